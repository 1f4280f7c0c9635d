// deepspeed._C.memory: rules of thumb for the states of a model, csrc/plan/memory_plan.h; rates of a machine.
#include "plan/memory_plan.h"

#include <pybind11/stl.h>

#include "base/process.h"
#include "bindings/registry.h"
#include "bindings/torch_types.h"
#include "storage/rates.h"
#include "zero/offload/auto_placements.h"

namespace py = pybind11;

DS_BINDINGS(m) {
  using namespace ds::plan;
  auto memory = m.def_submodule("memory");
  memory.def(
      "zero2_need",
      [](int64_t numel, int64_t ranks, int64_t nodes, bool offload_optimizer) {
        const MemoryNeed need = zero2_need(numel, {ranks, nodes}, offload_optimizer);
        return std::make_pair(need.host_bytes, need.device_bytes);
      },
      "numel"_a, "ranks"_a, "nodes"_a, "offload_optimizer"_a);
  memory.def("keep_freed_memory", &ds::keep_freed_memory);
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
  memory.def(
      "drive_update_rate",
      [](const std::string& folder) {
        ds::storage::Placement rest;
        rest.rest = ds::storage::Medium::kFile;
        rest.folder = folder;
        return ds::storage::known_update_rate(ds::storage::rates_folder(), at::kCPU, rest);
      },
      py::call_guard<py::gil_scoped_release>(), "folder"_a);
}
