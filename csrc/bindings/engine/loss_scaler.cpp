// The rules of loss scaling as one function of plain numbers: the Python classes keep the state as attributes, because
// checkpoints of this format pickle them.
#include <tuple>

#include "bindings/registry.h"
#include "optim/loss_scaler.h"

namespace py = pybind11;

namespace ds::bindings {

using namespace ds::optim;

DS_BINDINGS(m) {
  py::module_ loss = m.def_submodule("loss_scaler", "How the loss scale moves; see optim/loss_scaler.h.");
  py::class_<LossScaleRules>(loss, "Rules")
      .def(py::init([](double factor, int64_t window, double min_scale, int64_t hysteresis, bool consecutive_hysteresis,
                       bool raise_at_min, int64_t settling) {
             LossScaleRules rules{factor,       window,  min_scale, hysteresis, consecutive_hysteresis,
                                  raise_at_min, settling};
             rules.validate();
             return rules;
           }),
           "factor"_a, "window"_a, "min_scale"_a, "hysteresis"_a, "consecutive_hysteresis"_a, "raise_at_min"_a,
           "settling"_a = 0)
      .def(
          "next",
          [](const LossScaleRules& rules, double scale, int64_t iteration, int64_t last_overflow_iteration,
             int64_t hysteresis_left, bool overflow) {
            const LossScaleState next =
                next_loss_scale(rules, {scale, iteration, last_overflow_iteration, hysteresis_left}, overflow);
            return std::make_tuple(next.scale, next.iteration, next.last_overflow_iteration, next.hysteresis_left);
          },
          "scale"_a, "iteration"_a, "last_overflow_iteration"_a, "hysteresis_left"_a, "overflow"_a,
          "(scale, iteration, last_overflow_iteration, hysteresis_left) after one more step");
}

}  // namespace ds::bindings
