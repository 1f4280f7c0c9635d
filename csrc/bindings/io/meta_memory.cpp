// deepspeed._C.MetaMemory: csrc/storage/meta_memory.h.
#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include "bindings/registry.h"
#include "storage/meta_memory.h"

namespace py = pybind11;

namespace ds::bindings {

DS_BINDINGS(m) {
  using storage::MetaMemory;
  py::class_<MetaMemory>(m, "MetaMemory")
      .def(py::init<int64_t, bool>(), "block"_a = 1, "on_host"_a = false)
      .def_readonly_static("ELSEWHERE", &MetaMemory::kElsewhere, "The owner of what does not count.")
      .def("install", &MetaMemory::install)
      .def("remove", &MetaMemory::remove)
      .def("set_owner", &MetaMemory::set_owner, "owner"_a)
      .def("adopt", &MetaMemory::adopt, "tensor"_a, "owner"_a)
      .def("give_all", &MetaMemory::give_all, "owner"_a, "to"_a, "All that belongs to an owner goes to another one.")
      .def("set_moment", &MetaMemory::set_moment, "moment"_a)
      .def("reset_peak", &MetaMemory::reset_peak)
      .def(
          "set_rates",
          [](MetaMemory& memory, double host, double file, double host_step, double device_step) {
            memory.rates = {host, host, file, file, host_step, device_step};
          },
          "host"_a, "file"_a, "host_step"_a, "device_step"_a, "Bytes per second, by which states are placed.")
      .def_readonly("on_host", &MetaMemory::on_host)
      .def_readwrite("clock", &MetaMemory::clock, "The StepPlan to which kernels of the engine add their time.")
      .def_property_readonly("live", &MetaMemory::live)
      .def_property_readonly("owned", &MetaMemory::owned)
      .def_property_readonly("peaks", &MetaMemory::peaks)
      .def_property_readonly("peak", &MetaMemory::peak);
}

}  // namespace ds::bindings
