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
      .def(py::init<bool>(), "synchronous"_a = false)
      .def("set_phase", &StepPlan::set_phase, "phase"_a)
      .def("host", &StepPlan::host, "ns"_a)
      .def("synchronize", &StepPlan::synchronize)
      .def("compute", &StepPlan::compute, "ns"_a)
      .def("reset", &StepPlan::reset)
      .def_property_readonly("now", &StepPlan::now)
      .def_property_readonly("phases", &StepPlan::phases)
      .def_property_readonly("waited", &StepPlan::waited)
      .def_property_readonly("communicated", &StepPlan::communicated);
}

}  // namespace ds::bindings
