// deepspeed._C.lengths: which length of a sequence fits, csrc/plan/length_plan.h.
#include "plan/length_plan.h"

#include <pybind11/stl.h>

#include <utility>

#include "bindings/registry.h"
#include "comm/shared_memory/shm_group.h"
#include "parallel/result_memory.h"

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
           py::arg("samples"), "Of three lengths or more: (length, bytes by moment and part).")
      .def(
          "miss",
          [](const LengthCurve& self, const Sample& found) {
            return self.miss({found.first, found.second});
          },
          py::arg("found"), "At another sample, in thousandths.")
      .def("parts", &LengthCurve::parts, py::arg("length"))
      .def("peak", &LengthCurve::peak, py::arg("length"))
      .def("moment", &LengthCurve::moment, py::arg("length"))
      .def("longest", &LengthCurve::longest, py::arg("memory"), py::arg("step"), py::arg("limit"));
  lengths.def("exchange_memory", &ds::comm::ShmGroup::exchange_memory, py::arg("size"), py::arg("message"),
              "Shared memory that exchanges on a host touch.");
  lengths.attr("kept_result_bytes") = ds::parallel::ResultMemory::kLeast;
  lengths.attr("kept_results") = ds::parallel::ResultMemory::kMost;
  lengths.def("cheapest_step", &cheapest_step, py::arg("longest"), py::arg("now"), py::arg("gain_percent"));
}
