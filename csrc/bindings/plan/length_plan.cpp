// deepspeed._C.lengths: which length of a sequence fits, csrc/plan/length_plan.h.
#include "plan/length_plan.h"

#include <pybind11/stl.h>

#include <utility>

#include "bindings/registry.h"

namespace py = pybind11;

DS_BINDINGS(m) {
  using namespace ds::plan;
  using Sample = std::pair<int64_t, std::vector<std::vector<int64_t>>>;
  auto lengths = m.def_submodule("lengths");
  py::class_<LengthCurve>(lengths, "Curve", "Peak bytes against length.")
      .def(py::init([](const std::vector<Sample>& samples) {
             std::vector<LengthSample> made;
             for (const Sample& one : samples) made.push_back({one.first, one.second});
             return LengthCurve(std::move(made));
           }),
           "samples"_a, "Of three lengths or more: (length, bytes by moment and part).")
      .def(
          "miss",
          [](const LengthCurve& self, const Sample& found) {
            return self.miss({found.first, found.second});
          },
          "found"_a, "At another sample, in thousandths.")
      .def("parts", &LengthCurve::parts, "length"_a)
      .def("peak", &LengthCurve::peak, "length"_a)
      .def("moment", &LengthCurve::moment, "length"_a)
      .def("longest", &LengthCurve::longest, "memory"_a, "step"_a, "limit"_a);
  lengths.def("cheapest_step", &cheapest_step, "longest"_a, "now"_a, "gain_percent"_a);
}
