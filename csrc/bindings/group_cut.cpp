#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include "bindings/registry.h"
#include "zero/engine.h"
#include "zero/group_cut.h"

namespace py = pybind11;

namespace {

using ds::zero::GroupCut;
using Unlocked = py::call_guard<py::gil_scoped_release>;

at::Tensor pack(const GroupCut& cut, const std::vector<c10::optional<at::Tensor>>& pieces) {
  std::vector<at::Tensor> tensors;
  for (const auto& piece : pieces) tensors.push_back(piece.value_or(at::Tensor()));
  return cut.pack(tensors);
}

}  // namespace

DS_BINDINGS(m) {
  py::class_<GroupCut>(m, "GroupCut")
      .def(py::init([](ds::zero::Engine& engine, int32_t group, int64_t size) {
             return GroupCut(engine.params(), group, size);
           }),
           py::arg("engine"), py::arg("group"), py::arg("size"))
      .def("pack", &pack, Unlocked(), py::arg("pieces"))
      .def("unpack", &GroupCut::unpack, Unlocked(), py::arg("taken"))
      .def_property_readonly("give_numels", &GroupCut::give_numels)
      .def_property_readonly("take_numels", &GroupCut::take_numels);
}
