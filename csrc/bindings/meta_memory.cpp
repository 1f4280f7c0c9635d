// deepspeed._C.MetaMemory: csrc/storage/meta_memory.h.
#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include "bindings/registry.h"
#include "storage/meta_memory.h"

namespace py = pybind11;

namespace ds::bindings {

DS_BINDINGS(m) {
  using storage::MetaMemory;
  py::class_<MetaMemory>(m, "MetaMemory")
      .def(py::init<>())
      .def("track", &MetaMemory::track, "tensor"_a)
      .def("ignore", &MetaMemory::ignore, "tensor"_a)
      .def("reset_peak", &MetaMemory::reset_peak)
      .def_property_readonly("live", &MetaMemory::live)
      .def_property_readonly("peak", &MetaMemory::peak);
}

}  // namespace ds::bindings
