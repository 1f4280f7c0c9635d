// deepspeed._C.memory: bytes of model states, csrc/plan/memory_plan.h.
#include "plan/memory_plan.h"

#include <pybind11/stl.h>

#include "bindings/registry.h"
#include "zero/stage_policy.h"

namespace py = pybind11;

DS_BINDINGS(m) {
  using namespace ds::plan;
  auto memory = m.def_submodule("memory");
  memory.def(
      "states_per_rank",
      [](int stage, int64_t numel, int64_t world, int64_t param, int64_t grad, int64_t master, int64_t slots) {
        const ds::zero::StagePolicy& policy = ds::zero::stage_policy(stage);
        const Sharded sharded{policy.shards_params(), policy.shards_grads(), policy.shards_states()};
        const StateBytes bytes = states_per_rank(sharded, numel, world, {param, grad, master, slots});
        py::dict out;
        out["param"] = bytes.param;
        out["grad"] = bytes.grad;
        out["master"] = bytes.master;
        out["slots"] = bytes.slots;
        return out;
      },
      py::arg("stage"), py::arg("numel"), py::arg("world"), py::arg("param"), py::arg("grad"), py::arg("master"),
      py::arg("slots"));
  memory.def(
      "zero2_need",
      [](int64_t numel, int64_t ranks, int64_t nodes, bool offload_optimizer) {
        const MemoryNeed need = zero2_need(numel, {ranks, nodes}, offload_optimizer);
        return std::make_pair(need.host_bytes, need.device_bytes);
      },
      py::arg("numel"), py::arg("ranks"), py::arg("nodes"), py::arg("offload_optimizer"));
  memory.def(
      "zero3_need",
      [](int64_t numel, int64_t largest, int64_t ranks, int64_t nodes, bool offload_optimizer, bool offload_params,
         bool sharded_init) {
        const Zero3Options options{offload_optimizer, offload_params, sharded_init};
        const MemoryNeed need = zero3_need(numel, largest, {ranks, nodes}, options);
        return std::make_pair(need.host_bytes, need.device_bytes);
      },
      py::arg("numel"), py::arg("largest"), py::arg("ranks"), py::arg("nodes"), py::arg("offload_optimizer"),
      py::arg("offload_params"), py::arg("sharded_init"));
}
