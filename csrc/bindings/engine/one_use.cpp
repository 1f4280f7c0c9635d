// deepspeed._C.OneUse: csrc/zero/gradients/one_use.h, as a context.
#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include "bindings/registry.h"
#include "zero/gradients/one_use.h"

namespace py = pybind11;

namespace ds::bindings {

DS_BINDINGS(m) {
  using zero::OneUse;
  py::class_<OneUse>(m, "OneUse")
      .def(py::init<>())
      .def("__enter__", &OneUse::begin)
      .def("__exit__", [](OneUse& use, const py::object& error, const py::args&) {
        const bool complete = error.is_none();
        py::gil_scoped_release unlocked;
        use.end(complete);
      });
}

}  // namespace ds::bindings
