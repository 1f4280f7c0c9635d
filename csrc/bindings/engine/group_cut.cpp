// deepspeed._C.GroupCut: csrc/zero/states/group_cut.h.
#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include "bindings/registry.h"
#include "bindings/engine/state_kind.h"
#include "bindings/torch_types.h"
#include "zero/engine.h"
#include "zero/states/group_cut.h"

namespace py = pybind11;

namespace {

using ds::zero::GroupCut;
using Pieces = std::vector<c10::optional<at::Tensor>>;
using Unlocked = py::call_guard<py::gil_scoped_release>;

}  // namespace

DS_BINDINGS(m) {
  using ds::bindings::undefined_for_none;
  py::class_<GroupCut>(m, "GroupCut")
      .def(py::init([](ds::zero::Engine& engine, int32_t group) {
             return GroupCut(engine.params(), engine.states(), group);
           }),
           py::keep_alive<1, 2>(), "engine"_a, "group"_a)
      .def_property_readonly("size", &GroupCut::size)
      .def_property_readonly("owned", &GroupCut::owned)
      .def_property_readonly("first", &GroupCut::first)
      .def(
          "partition",
          [](const GroupCut& cut, const Pieces& pieces) { return cut.partition(undefined_for_none(pieces)); },
          Unlocked(), "pieces"_a)
      .def(
          "in_pieces",
          [](const GroupCut& cut, const Pieces& pieces, int64_t numel) {
            return cut.in_pieces(undefined_for_none(pieces), numel);
          },
          "pieces"_a, "numel"_a)
      .def(
          "source",
          [](const GroupCut& cut, const std::shared_ptr<ds::zero::Engine>& engine, const std::string& kept, int slot,
             int64_t numel) -> ds::io::SourcePtr {
            return cut.source(engine, ds::bindings::state_kind(kept), slot, numel);
          },
          Unlocked(), "engine"_a, "kept"_a, "slot"_a, "numel"_a)
      .def("slices", [](const GroupCut& cut) {
        std::vector<std::tuple<size_t, int64_t, int64_t>> found;
        for (const GroupCut::Slice& slice : cut.slices()) found.emplace_back(slice.param, slice.at, slice.numel);
        return found;
      });
}
