// Layers that are cut among ranks: csrc/parallel/tensor_exchange.h.
#include "parallel/tensor_exchange.h"

#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include "bindings/registry.h"
#include "parallel/gradient_node.h"

namespace py = pybind11;

namespace ds::bindings {

DS_BINDINGS(m) {
  using parallel::TensorExchange;
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<TensorExchange, std::shared_ptr<TensorExchange>>(m, "TensorExchange")
      .def(py::init<comm::CommunicatorPtr, bool>(), "ranks"_a, "overlap"_a = false)
      .def_property_readonly("ranks", &TensorExchange::ranks)
      .def("copy_in", &TensorExchange::copy_in, "input"_a, Unlocked())
      .def("sum_out", &TensorExchange::sum_out, "part"_a, Unlocked())
      .def("gather_in", &TensorExchange::gather_in, "part"_a, "dim"_a, "widths"_a, Unlocked())
      .def("scatter_out", &TensorExchange::scatter_out, "part"_a, "dim"_a, "widths"_a, Unlocked())
      .def("__deepcopy__", [](const std::shared_ptr<TensorExchange>& self, const py::dict&) { return self; })
      .def("start_sum", &TensorExchange::start_sum, "part"_a, Unlocked())
      .def("copy_in_beside", &TensorExchange::copy_in_beside, "input"_a, "place"_a, Unlocked())
      .def_static("place_now", &parallel::place_now)
      .def("linear", &TensorExchange::linear, "input"_a, "weight"_a, "bias"_a = py::none(), Unlocked());
  py::class_<parallel::PendingSum>(m, "PendingSum").def("wait", &parallel::PendingSum::wait, Unlocked());
  m.def("gather_widths", &parallel::gather_widths, "ranks"_a, "part"_a, "dim"_a, "widths"_a, Unlocked());
  m.def("split_widths", &parallel::split_widths, "ranks"_a, "whole"_a, "dim"_a, "widths"_a, Unlocked());
  m.def("sum_gradients", &parallel::sum_gradients, "param"_a, "ranks"_a, Unlocked());
}

}  // namespace ds::bindings
