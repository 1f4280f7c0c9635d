// The clock of an engine's steps, for profiling/phases.py, and what they wait for.
#include <Python.h>

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "base/ranges.h"
#include "base/step_clock.h"
#include "bindings/registry.h"
#include "comm/decorators/step_waits.h"

namespace ds::bindings {

DS_BINDINGS(m) {
  pybind11::class_<StepClock, StepClockPtr>(m, "StepClock")
      .def(pybind11::init<>())
      .def("turn", &StepClock::turn, "on"_a)
      .def(
          "enter",
          [](StepClock& clock, const std::string& phase) {
            const auto found = static_cast<size_t>(index_of(kPhaseNames, phase));
            if (found == kPhases) fail(ErrorKind::kValue, "a step has no phase '", phase, "'");
            return clock.enter(static_cast<ds::Phase>(found));
          },
          "phase"_a)  // returns the argument of leave()
      .def("leave", &StepClock::leave, "mark"_a)
      // (wall, [of each phase], [of each phase while a backward was open]) in nanoseconds, since the first phase, in
      // the order of PHASES; and how many phases have begun.
      .def("totals", [](StepClock& clock) {
        const StepClock::Totals found = clock.totals();
        return std::make_tuple(found.wall, found.all, found.in_backward, found.begun);
      });
  m.attr("PHASES") = pybind11::tuple(pybind11::cast(kPhaseNames));
  pybind11::class_<comm::StepWaits, comm::StepWaitsPtr>(m, "StepWaits")
      .def(pybind11::init([](StepClockPtr clock, const std::string& device) {
             return std::make_shared<comm::StepWaits>(std::move(clock), c10::Device(device));
           }),
           "clock"_a, "device"_a)
      .def("begin", &comm::StepWaits::begin)
      .def("end", &comm::StepWaits::end)
      .def("end_step", &comm::StepWaits::end_step)
      .def("take", &comm::StepWaits::take);
}

}  // namespace ds::bindings
