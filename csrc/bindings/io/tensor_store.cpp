// deepspeed._C.TensorStore: tensors that wait for backward, csrc/storage/tensor_store.h.
#include "storage/tensor_store.h"

#include <pybind11/stl.h>

#include "bindings/registry.h"
#include "bindings/torch_types.h"

namespace py = pybind11;

DS_BINDINGS(m) {
  using namespace ds::storage;
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<TensorStore, std::shared_ptr<TensorStore>>(m, "TensorStore", "Tensors that wait for backward.")
      .def(py::init([](const at::Device& device, const Placement& placement, int at_once) {
             return std::make_shared<TensorStore>(device, placement, FileAccess{}, at_once);
           }),
           "device"_a, "placement"_a, "at_once"_a = 2)
      .def("put", &TensorStore::put, "tensor"_a, Unlocked(), "A number; the copy is made beside the device.")
      .def("get", &TensorStore::get, "number"_a, Unlocked(), "A copy on the device.")
      .def("prefetch", &TensorStore::prefetch, "number"_a, Unlocked(), "It is the next to be asked for.")
      .def("drop", &TensorStore::drop, "number"_a, Unlocked(), "Nobody asks for it again.")
      .def_static(
          "room", [](int64_t largest) { return TensorStore::room(largest); }, "largest"_a,
          "Of the device, for all copies.")
      .def_property_readonly("waiting", &TensorStore::waiting)
      .def_property_readonly("device", &TensorStore::device)
      .def_property_readonly("bytes", [](const TensorStore& store) {
        py::dict media;
        for (const MediumUsage& one : store.usage().media) media[py::str(one.name)] = one.total();
        return media;
      });
}
