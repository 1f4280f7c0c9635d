// Planes that Python moves between memories. See zero/offload_states.py.
#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/registry.h"
#include "bindings/torch_types.h"
#include "storage/flat_view.h"
#include "storage/shard_storage.h"
#include "storage/tier.h"

namespace py = pybind11;
using namespace ds::storage;

namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

std::vector<PlaneId> planes_of(const std::vector<int32_t>& numbers) {
  std::vector<PlaneId> planes;
  for (const int32_t number : numbers) planes.push_back({number});
  return planes;
}

py::dict usage_of(const ShardStorage& storage) {
  const Usage usage = storage.usage();
  py::dict media;
  for (const MediumUsage& medium : usage.media) media[py::str(medium.name)] = medium.total();
  media["unpinned"] = usage.unpinned_bytes;
  media["unpinned_reason"] = usage.unpinned_reason;
  return media;
}

}  // namespace

DS_BINDINGS(m) {
  py::class_<ShardStorage, std::shared_ptr<ShardStorage>>(m, "ShardStorage", "Memory in tiers.")
      .def(py::init([](const at::Device& device) { return std::make_shared<ShardStorage>(device); }), py::arg("device"))
      .def(
          "adopt",
          [](ShardStorage& storage, const std::string& name, const at::Tensor& tensor) {
            const auto bytes = static_cast<int64_t>(tensor.storage().nbytes());
            return storage.add(name, bytes, at::kByte, {}, {}, flat_view(tensor, 0, at::kByte, bytes)).number;
          },
          py::arg("name"), py::arg("tensor"),
          "A plane of all memory behind a tensor; the tensor stays valid over moves.")
      .def(
          "move",
          [](ShardStorage& storage, const std::vector<int32_t>& planes, const std::string& medium, bool pinned,
             bool wait_each) {
            Placement placement;
            placement.rest = medium_named(medium);
            placement.pinned = pinned;
            storage.move(planes_of(planes), placement, wait_each);
          },
          py::arg("planes"), py::arg("medium"), py::arg("pinned") = false, py::arg("wait_each") = false, Unlocked(),
          "Their memory is there when the call returns, and no longer where it was.")
      .def(
          "remove", [](ShardStorage& storage, int32_t plane) { storage.remove({plane}); }, py::arg("plane"), Unlocked())
      .def("usage", &usage_of, "Bytes by medium; what was to be pinned and is not.");
}
