// deepspeed._C.SavedLayout: csrc/plan/saved_layout.h.
#include "plan/saved_layout.h"

#include <pybind11/stl.h>

#include "bindings/registry.h"

namespace py = pybind11;
using ds::plan::SavedLayout;

DS_BINDINGS(m) {
  py::class_<SavedLayout>(m, "SavedLayout")
      .def_static("flat", &SavedLayout::flat, py::arg("numels"), py::arg("partitions"), py::arg("ranks"),
                  py::arg("origin"))
      .def_static("sliced", &SavedLayout::sliced, py::arg("numels"), py::arg("units"), py::arg("ranks"),
                  py::arg("origin"))
      .def_static("sub_grouped", &SavedLayout::sub_grouped, py::arg("numels"), py::arg("most"), py::arg("ranks"))
      .def("units", &SavedLayout::units)
      .def("unit", &SavedLayout::unit, py::arg("param"))
      .def("place_in_unit", &SavedLayout::place_in_unit, py::arg("param"))
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
          py::arg("param"));
  m.def("writers_of", &ds::plan::writers_of, py::arg("numels"), py::arg("count"));
}
