// Results whose gradients a function of this room computes, as a node of autograd.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace ds::parallel {

using Tensors = std::vector<at::Tensor>;

// `results` of `inputs`, without gradients so far. Where an input needs a gradient, `back` gets those of all results
// and gives those of all inputs. It is called on every rank alike: what has no gradient is zero there.
Tensors with_gradient(const char* name, const Tensors& inputs, Tensors results, std::function<Tensors(Tensors)> back);
at::Tensor with_gradient(const char* name, const at::Tensor& input, at::Tensor result,
                         std::function<at::Tensor(const at::Tensor&)> back);

}  // namespace ds::parallel
