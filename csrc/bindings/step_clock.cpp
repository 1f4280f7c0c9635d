// The clock of an engine's steps, for engine/phases.py.
#include <Python.h>

#include <pybind11/stl.h>

#include "base/step_clock.h"
#include "bindings/registry.h"

namespace ds::bindings {

DS_BINDINGS(m) {
  pybind11::class_<StepClock, StepClockPtr>(m, "StepClock")
      .def(pybind11::init<>())
      .def("turn", &StepClock::turn, "on"_a)
      // phase: below kPhases. Returns the argument of leave().
      .def(
          "enter", [](StepClock& clock, uint8_t phase) { return clock.enter(static_cast<Phase>(phase % kPhases)); },
          "phase"_a)
      .def("leave", &StepClock::leave, "mark"_a)
      // (wall, [of each phase], [of each phase while a backward was open]) in nanoseconds, since the first phase.
      .def("totals", [](StepClock& clock) {
        const StepClock::Totals found = clock.totals();
        return std::make_tuple(found.wall, found.all, found.in_backward);
      });
}

}  // namespace ds::bindings
