// deepspeed._C.SplitBackward: csrc/zero/gradients/split_backward.h.
#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include "bindings/registry.h"
#include "zero/gradients/split_backward.h"

namespace py = pybind11;

namespace ds::bindings {

DS_BINDINGS(m) {
  using zero::SplitBackward;
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<SplitBackward>(m, "SplitBackward")
      .def(py::init<const std::vector<at::Tensor>&, std::vector<at::Tensor>, const std::vector<at::Tensor>&>(),
           "outputs"_a, "grads"_a, "inputs"_a)
      .def("run_inputs", &SplitBackward::run_inputs, Unlocked())
      .def("run_weights", &SplitBackward::run_weights, Unlocked())
      .def_property_readonly("nothing_left", &SplitBackward::nothing_left);
}

}  // namespace ds::bindings
