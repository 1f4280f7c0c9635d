// Functions of tensors of several ranks, with gradients: csrc/parallel/rank_nodes.h.
#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "bindings/registry.h"
#include "comm/communicator.h"
#include "parallel/rank_nodes.h"

namespace py = pybind11;

namespace ds::bindings {

DS_BINDINGS(m) {
  using parallel::RowExchange;
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m.def("gather_over_ranks", &parallel::gather, "ranks"_a, "part"_a, "dim"_a, Unlocked());
  m.def("scatter_over_ranks", &parallel::scatter, "ranks"_a, "whole"_a, "dim"_a, Unlocked());
  m.def("reduce_over_ranks", &parallel::reduce, "ranks"_a, "tensor"_a, Unlocked());
  m.def("share_over_ranks", &parallel::share, "ranks"_a, "tensor"_a, Unlocked());
  m.def("exchange_rows", &parallel::exchange_rows, "ranks"_a, "rows"_a, "given"_a, "taken"_a, Unlocked());
  py::class_<RowExchange, std::shared_ptr<RowExchange>>(m, "RowExchange")
      .def(py::init<comm::CommunicatorPtr, std::vector<int64_t>, std::vector<int64_t>, std::string,
                    RowExchange::Started, RowExchange::Waited>(),
           "ranks"_a, "given"_a, "taken"_a, "what"_a, "started"_a, "waited"_a)
      .def("start", &RowExchange::start, "rows"_a, Unlocked())
      .def("wait", &RowExchange::wait, "arriving"_a, Unlocked());
}

}  // namespace ds::bindings
