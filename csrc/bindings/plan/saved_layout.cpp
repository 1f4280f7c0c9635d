// deepspeed._C.SavedLayout: csrc/plan/saved_layout.h.
#include "plan/saved_layout.h"

#include <pybind11/stl.h>

#include "bindings/registry.h"

namespace py = pybind11;
using ds::plan::SavedLayout;

DS_BINDINGS(m) {
  py::class_<SavedLayout>(m, "SavedLayout")
      .def_static("flat", &SavedLayout::flat, "numels"_a, "partitions"_a, "ranks"_a, "origin"_a)
      .def_static("sliced", &SavedLayout::sliced, "numels"_a, "units"_a, "ranks"_a, "origin"_a)
      .def_static("sub_grouped", &SavedLayout::sub_grouped, "numels"_a, "most"_a, "ranks"_a)
      .def("units", &SavedLayout::units)
      .def("unit", &SavedLayout::unit, "param"_a)
      .def("index_in_unit", &SavedLayout::index_in_unit, "param"_a)
      // [(first element within the parameter, numel, rank, first element within the unit's tensor)]
      .def(
          "runs",
          [](const SavedLayout& self, size_t param) {
            py::list found;
            for (const ds::plan::SavedRun& run : self.runs(param)) {
              found.append(py::make_tuple(run.param_offset, run.numel, run.rank, run.begin));
            }
            return found;
          },
          "param"_a);
  m.def("writers_of", &ds::plan::writers_of, "numels"_a, "count"_a);
}
