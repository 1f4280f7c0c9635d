// deepspeed._C.memory: bytes of model states, csrc/plan/memory_plan.h.
#include "plan/memory_plan.h"

#include <pybind11/stl.h>

#include "bindings/registry.h"
#include "bindings/torch_types.h"
#include "storage/rates.h"
#include "zero/offload/auto_placements.h"
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
      "stage"_a, "numel"_a, "world"_a, "param"_a, "grad"_a, "master"_a, "slots"_a);
  memory.def("moved_bucket_limit", &moved_bucket_limit, "numel"_a);
  memory.def(
      "zero2_need",
      [](int64_t numel, int64_t ranks, int64_t nodes, bool offload_optimizer) {
        const MemoryNeed need = zero2_need(numel, {ranks, nodes}, offload_optimizer);
        return std::make_pair(need.host_bytes, need.device_bytes);
      },
      "numel"_a, "ranks"_a, "nodes"_a, "offload_optimizer"_a);
  memory.def(
      "zero3_need",
      [](int64_t numel, int64_t largest, int64_t ranks, int64_t nodes, bool offload_optimizer, bool offload_params,
         bool sharded_init) {
        const Zero3Options options{offload_optimizer, offload_params, sharded_init};
        const MemoryNeed need = zero3_need(numel, largest, {ranks, nodes}, options);
        return std::make_pair(need.host_bytes, need.device_bytes);
      },
      "numel"_a, "largest"_a, "ranks"_a, "nodes"_a, "offload_optimizer"_a, "offload_params"_a, "sharded_init"_a);

  // Bytes per second: to_host, to_device, file_read, file_write, host_step, device_step; see plan/place_plan.h.
  using Rates = std::array<double, 6>;
  memory.def(
      "machine_rates",
      [](const at::Device& device, bool pinned, const std::string& folder, int threads) {
        const int used = ds::storage::known_threads(ds::storage::rates_folder(), threads);
        const PlaceRates r = ds::zero::machine_rates(device, pinned, folder, {}, used);
        return Rates{r.to_host, r.to_device, r.file_read, r.file_write, r.host_step, r.device_step};
      },
      py::call_guard<py::gil_scoped_release>(), "device"_a, "pinned"_a, "folder"_a, "threads"_a);
  // what -> (device, host, file) shares; seconds of a step, bytes on the link and of files. need: bytes of this rank,
  // of gradients, masters, states, weights; room as zero_optimization.placement has it.
  memory.def(
      "auto_placements",
      [](const std::array<int64_t, 4>& need, const std::array<int64_t, 3>& room, int64_t accumulation,
         const Rates& rates) {
        ds::zero::TierBytes have;
        have.device = room[0];
        have.host = room[1];
        have.file = room[2];
        have.accumulation = accumulation;
        have.rates = {rates[0], rates[1], rates[2], rates[3], rates[4], rates[5]};
        const ds::zero::StateBytes bytes{need[0], need[1], need[2], need[3]};
        ds::zero::auto_placements(bytes, have);  // says what is missing
        const PlacePlan plan = place_plan(ds::zero::place_need(bytes, have), have.rates);
        py::dict shares;
        for (const auto& [name, of] : {std::make_pair("grad", plan.grad), std::make_pair("master", plan.master),
                                       std::make_pair("slots", plan.slots)})
          shares[name] = std::array<double, 3>{of.device(), of.host, of.file};
        const PlaceNeed as = ds::zero::place_need(bytes, have);
        const auto moved = shared_seconds(as, {1, 1, 1, 1, 0, 0}, plan.grad, plan.master, plan.slots);
        return std::make_tuple(shares, plan.seconds, moved[0], moved[1]);
      },
      "need"_a, "room"_a, "accumulation"_a, "rates"_a);
}
