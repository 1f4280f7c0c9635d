// deepspeed._C.TensorCut, and the runs of units that cuts are made of: csrc/plan/tensor_cut.h.
#include "plan/tensor_cut.h"

#include <pybind11/stl.h>

#include <tuple>

#include "bindings/registry.h"

namespace py = pybind11;
using ds::plan::TensorCut;

DS_BINDINGS(m) {
  py::class_<TensorCut>(m, "TensorCut")
      .def(py::init<const std::vector<int64_t>&, const std::vector<std::vector<ds::plan::UnitRun>>&>(), "sizes"_a,
           "runs"_a)
      .def("__deepcopy__", [](const py::object& self, const py::dict&) { return self; })  // it never changes
      .def("ranks", &TensorCut::ranks)
      .def("size", &TensorCut::size)
      .def("width", &TensorCut::width, "rank"_a)
      .def("runs", &TensorCut::runs, "rank"_a)
      // [(first element within the rank's slice, first element within the whole, length)]
      .def(
          "owned",
          [](const TensorCut& self, int rank) {
            std::vector<std::tuple<int64_t, int64_t, int64_t>> found;
            for (const auto& [in_slice, in_whole, length] : self.owned(rank)) {
              found.emplace_back(in_slice, in_whole, length);
            }
            return found;
          },
          "rank"_a)
      .def("holders", &TensorCut::holders, "rank"_a)
      .def("copied", &TensorCut::copied)
      .def("mixed", &TensorCut::mixed);
  m.def("unit_runs", &ds::plan::unit_runs, "count"_a, "ranks"_a);
  m.def("shared_runs", &ds::plan::shared_runs, "runs"_a, "readers"_a, "count"_a);
  m.def("grouped_runs", &ds::plan::grouped_runs, "query"_a, "kv"_a, "ranks"_a);
  m.def("shard_sizes", &ds::plan::shard_sizes, "total"_a, "ranks"_a, "grain"_a, "units"_a);
}
