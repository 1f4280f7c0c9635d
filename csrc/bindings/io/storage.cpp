// Planes that Python moves between memories. See zero/offload/offload_states.py.
#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/registry.h"
#include "bindings/torch_types.h"
#include "io/folders/paths.h"
#include "io/folders/run_folder.h"
#include "io/folders/swap_files.h"
#include "storage/flat_view.h"
#include "storage/rates.h"
#include "storage/shard_storage.h"
#include "storage/tier.h"

namespace py = pybind11;

namespace ds::bindings {

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

// Returns a dict for each medium, and "budget_waits" and other figures of the whole storage.
py::dict report_of(const ShardStorage& storage) {
  const Usage usage = storage.usage();
  py::dict report, media;
  for (const MediumUsage& one : usage.media) {
    py::dict row;
    row["resting_bytes"] = one.resting;
    row["held_bytes"] = one.total();
    row["peak_bytes"] = one.peak;
    row["over_budget"] = one.over_budget;
    row["read_bytes"] = one.read_bytes;
    row["written_bytes"] = one.written_bytes;
    row["read_seconds"] = one.read_seconds;
    row["write_seconds"] = one.write_seconds;
    row["waited_seconds"] = one.waited_seconds;
    media[py::str(one.name)] = row;
  }
  report["media"] = media;
  report["budget_waits"] = usage.budget_waits;
  report["prefetches"] = usage.prefetches;
  report["prefetch_hits"] = usage.prefetch_hits;
  return report;
}

// A folder of files that go with the object, which no other run may use meanwhile.
struct SwapFolder {
  SwapFolder(const std::string& key, const std::string& base, const std::string& below)
      : path(ds::io::swap_folder(key, base, below)),
        held(ds::io::parent_folder(path), path.substr(path.rfind('/') + 1), {}) {}
  const std::string path;
  ds::io::RunFolder held;
};

}  // namespace

DS_BINDINGS(m) {
  m.def("rates_folder", &rates_folder, "Where measured rates of this machine are kept; \"\": nowhere.");
  py::class_<SwapFolder>(m, "SwapFolder", "A folder for files of this run alone, below one of the user.")
      .def(py::init<const std::string&, const std::string&, const std::string&>(), "key"_a, "base"_a, "below"_a)
      .def_readonly("path", &SwapFolder::path);
  py::class_<Placement>(m, "Placement", "Where a plane rests.")
      .def(py::init([](const std::string& rest, bool pinned, const std::string& folder) {
             Placement made;
             made.rest = medium_named(rest);
             made.pinned = pinned;
             made.folder = folder;
             return made;
           }),
           "rest"_a, "pinned"_a = false, "folder"_a = "")
      .def_property_readonly("rest", [](const Placement& placement) { return name_of(placement.rest); })
      .def_readonly("rest_share", &Placement::host_share)
      .def_readonly("file_share", &Placement::file_share)
      .def(
          "__eq__", [](const Placement& a, const Placement& b) { return a == b; }, py::is_operator());
  m.def(
      "known_rate",
      [](const at::Device& device, const Placement& rest) {
        const TierRate rate = known_rate(rates_folder(), device, rest);
        return std::make_pair(rate.read, rate.write);
      },
      "device"_a, "rest"_a, Unlocked());
  py::class_<ShardStorage, std::shared_ptr<ShardStorage>>(m, "ShardStorage", "Memory in tiers.")
      .def(py::init([](const at::Device& device) { return std::make_shared<ShardStorage>(device); }), "device"_a)
      .def(
          "adopt",
          [](ShardStorage& storage, const std::string& name, const at::Tensor& tensor) {
            const auto bytes = static_cast<int64_t>(tensor.storage().nbytes());
            return storage.add(name, bytes, at::kByte, {}, {}, flat_view(tensor, 0, at::kByte, bytes)).number;
          },
          "name"_a, "tensor"_a, "A plane of all memory behind a tensor; the tensor stays valid over moves.")
      .def(
          "move",
          [](ShardStorage& storage, const std::vector<int32_t>& planes, const Placement& placement, bool wait_each) {
            storage.move(planes_of(planes), placement, wait_each);
          },
          "planes"_a, "placement"_a, "wait_each"_a = false, Unlocked(),
          "Their memory is there when the call returns, and no longer where it was.")
      .def(
          "placement", [](const ShardStorage& storage, int32_t plane) { return storage.placement({plane}); }, "plane"_a)
      .def(
          "addresses",
          [](const ShardStorage& storage, int32_t plane) {
            std::vector<uintptr_t> found;
            for (const at::Tensor& memory : storage.memory({plane}))
              found.push_back(reinterpret_cast<uintptr_t>(memory.storage().data()));
            return found;
          },
          "plane"_a, "Where the memory behind its parts begins.")
      .def_property_readonly("device", &ShardStorage::device)
      .def(
          "remove", [](ShardStorage& storage, int32_t plane) { storage.remove({plane}); }, "plane"_a, Unlocked())
      .def("record_copies", &ShardStorage::record_copies, Unlocked(), "on"_a)
      // (plane, medium, whether it was read, bytes, begin, end) of each transfer, times as of time.perf_counter().
      .def("take_copies",
           [](ShardStorage& storage) {
             py::list found;
             for (const CopyRecord& one : storage.take_copies())
               found.append(py::make_tuple(one.plane, one.medium, one.read, one.bytes, one.begin, one.end));
             return found;
           })
      .def("report", &report_of, "What has rested, moved and been waited for, by medium.")
      .def("usage", &usage_of, "Bytes by medium; what was to be pinned and is not.");
}

}  // namespace ds::bindings
