// deepspeed._C.StepPlan: csrc/plan/step_plan.h.
#include <Python.h>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>

#include "bindings/registry.h"
#include "plan/step_plan.h"

namespace py = pybind11;

namespace ds::bindings {

DS_BINDINGS(m) {
  using plan::LinkCost;
  using plan::StepPlan;
  py::class_<LinkCost>(m, "LinkCost")
      .def(py::init<int64_t, int64_t>(), "latency_ns"_a = 0, "bytes_per_second"_a = 0)
      .def_readonly("latency_ns", &LinkCost::latency_ns)
      .def_readonly("bytes_per_second", &LinkCost::bytes_per_second)
      .def("time_of", &LinkCost::time_of, "sent_bytes"_a, "ranks"_a);
  py::class_<StepPlan, std::shared_ptr<StepPlan>>(m, "StepPlan")
      .def(py::init<bool, int64_t>(), "synchronous"_a = false, "call_ns"_a = 0)
      .def_readonly_static("HOST", &StepPlan::kHost, "The lane of the host in the timeline.")
      .def_readonly_static("COMPUTE", &StepPlan::kCompute, "That of the stream that computes.")
      .def("set_phase", &StepPlan::set_phase, "phase"_a)
      .def("host", &StepPlan::host, "ns"_a)
      .def("dispatched", &StepPlan::dispatched)
      .def("compute", &StepPlan::compute, "ns"_a, "name"_a = "")
      .def("kernel", &StepPlan::kernel, "ns"_a, "name"_a = "")
      .def("host_waits", py::overload_cast<std::string_view>(&StepPlan::host_waits), "what"_a)
      .def("host_waits", py::overload_cast<std::string_view, int64_t>(&StepPlan::host_waits), "what"_a, "mark"_a)
      .def("end", &StepPlan::end)
      .def("record", &StepPlan::record, "on"_a)
      .def("reset", &StepPlan::reset)
      .def_property_readonly("now", &StepPlan::now)
      .def_property_readonly("mark", &StepPlan::mark)
      .def_property_readonly("phases", &StepPlan::phases)
      .def_property_readonly("counts",
                             [](const StepPlan& step) {
                               py::dict made;
                               for (const auto& [phase, one] : step.counts())
                                 made[py::str(phase)] =
                                     py::dict("dispatched"_a = one.dispatched, "launches"_a = one.launches,
                                              "kernels"_a = one.kernels, "collectives"_a = one.collectives,
                                              "host_waits"_a = one.host_waits);
                               return made;
                             })
      .def_property_readonly(
          "timeline",
          [](const StepPlan& step) {
            py::list made;
            for (const plan::StepSpan& one : step.timeline())
              made.append(py::make_tuple(one.lane, one.name, one.phase, one.begin, one.end, one.exposed));
            return made;
          })
      .def_property_readonly("waited", &StepPlan::waited)
      .def_property_readonly("communicated", &StepPlan::communicated);
}

}  // namespace ds::bindings
