// deepspeed._C.linear_keeping_weight: csrc/zero/gathers/linear.h.
#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include "bindings/registry.h"
#include "zero/gathers/linear.h"

namespace py = pybind11;

namespace ds::bindings {

DS_BINDINGS(m) {
  m.def("linear_keeping_weight", &zero::linear_keeping_weight, py::call_guard<py::gil_scoped_release>(), "input"_a,
        "weight"_a, "bias"_a = py::none());
}

}  // namespace ds::bindings
