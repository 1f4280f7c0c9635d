// Results whose gradients a function of this room computes, as a node of autograd.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/Optional.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace ds::parallel {

using Tensors = std::vector<at::Tensor>;

// `results` of `inputs`, without gradients so far. Where an input needs a gradient, `back` gets those of all results
// and gives those of all inputs. It is called on every rank alike: what has no gradient is zero there. `place`, which
// place_now() gave: in backward the node runs as if it had been made then. Of the nodes that could run, autograd takes
// the one that was made last.
using Place = c10::optional<uint64_t>;
Tensors with_gradient(const char* name, const Tensors& inputs, Tensors results, std::function<Tensors(Tensors)> back,
                      Place place = c10::nullopt);
at::Tensor with_gradient(const char* name, const at::Tensor& input, at::Tensor result,
                         std::function<at::Tensor(const at::Tensor&)> back, Place place = c10::nullopt);
uint64_t place_now();

// `tensor` in the same memory, without a gradient.
at::Tensor alias_of(const at::Tensor& tensor);

}  // namespace ds::parallel
