// Random choices of tokens and layers, and what the core does not wait for while layers are dropped.
#include "kernels/random_choice.h"

#include <torch/csrc/utils/pybind.h>

#include <ATen/ops/empty.h>
#include <pybind11/stl.h>

#include <memory>
#include <vector>

#include "base/error.h"
#include "bindings/registry.h"
#include "bindings/engine/sharded_params.h"
#include "zero/engine.h"

namespace py = pybind11;

namespace {

using ds::kernels::ChoiceFor;
using ds::kernels::ChoicePlace;
using ds::zero::Engine;
using ds::zero::ShardedParam;
using ds::zero::ShardedParamPtr;

at::Tensor choose_tokens(uint64_t seed, uint32_t step, uint32_t layer, uint32_t first, int64_t samples, int64_t count,
                         int64_t keep) {
  if (samples < 0 || keep < 0 || keep > count || count > INT32_MAX)
    ds::fail(ds::ErrorKind::kValue, "cannot choose ", keep, " of ", count, " tokens for ", samples, " samples");
  at::Tensor chosen = at::empty({samples, keep}, at::kInt);
  int32_t* out = chosen.data_ptr<int32_t>();
  for (int64_t sample = 0; sample < samples; ++sample)
    ds::kernels::choose_items({seed, ChoiceFor::kTokens, step, layer, first + static_cast<uint32_t>(sample)},
                              static_cast<uint32_t>(count), static_cast<uint32_t>(keep), out + sample * keep);
  return chosen;
}

std::vector<double> layer_numbers(uint64_t seed, uint32_t step, uint32_t micro_step, uint32_t layers) {
  std::vector<double> numbers;
  for (uint32_t layer = 0; layer < layers; ++layer)
    numbers.push_back(ds::kernels::choice_number({seed, ChoiceFor::kLayers, step, layer, micro_step}));
  return numbers;
}

void leave_out(Engine& engine, const std::vector<size_t>& trained, const std::vector<ShardedParamPtr>& sharded) {
  engine.grads().grad_uses().leave_out(trained);
  if (!engine.gatherer()) return;
  std::vector<ShardedParam*> params;
  for (const ShardedParamPtr& param : sharded) params.push_back(param.get());
  engine.gatherer()->leave_out(params);
}

}  // namespace

DS_BINDINGS(m) {
  m.def("choose_tokens", &choose_tokens, py::call_guard<py::gil_scoped_release>(), "seed"_a, "step"_a, "layer"_a,
        "first"_a, "samples"_a, "count"_a, "keep"_a,
        "int32 [samples, keep] in host memory: of each sample, numbered from `first`, ascending numbers of tokens.");
  m.def("layer_numbers", &layer_numbers, "seed"_a, "step"_a, "micro_step"_a, "layers"_a,
        "A random number in [0, 1) for each layer.");
  m.def("leave_out", &leave_out, "engine"_a, "trained"_a, "sharded"_a,
        "Until the next call no bucket waits for the gradients of `trained`, numbers in the engine, and modules do not "
        "gather `sharded`.");
}
