// Learning-rate schedules: plain numbers in, one rate per parameter group out.
#include <pybind11/stl.h>

#include "bindings/registry.h"
#include "optim/lr_schedule.h"

namespace py = pybind11;

namespace ds::bindings {

using namespace ds::optim;

DS_BINDINGS(m) {
  py::module_ lr = m.def_submodule("lr_schedules", "Schedules as functions of the iteration; see optim/lr_schedule.h.");
  py::class_<WarmupLr>(lr, "WarmupLr")
      .def(py::init([](PerGroup min_lr, PerGroup max_lr, int64_t num_steps, const std::string& curve) {
             return WarmupLr(std::move(min_lr), std::move(max_lr), num_steps, warmup_curve(curve));
           }),
           "min_lr"_a, "max_lr"_a, "num_steps"_a, "curve"_a)
      .def("lr", &WarmupLr::lr);
  py::class_<WarmupDecayLr>(lr, "WarmupDecayLr")
      .def(py::init([](PerGroup min_lr, PerGroup max_lr, int64_t num_steps, const std::string& curve,
                       int64_t total_steps) {
             return WarmupDecayLr(std::move(min_lr), std::move(max_lr), num_steps, warmup_curve(curve), total_steps);
           }),
           "min_lr"_a, "max_lr"_a, "num_steps"_a, "curve"_a, "total_steps"_a)
      .def("lr", &WarmupDecayLr::lr);
  py::class_<WarmupCosineLr>(lr, "WarmupCosineLr")
      .def(py::init([](PerGroup base_lr, double min_ratio, int64_t num_steps, double cos_min_ratio,
                       const std::string& curve, int64_t total_steps) {
             return WarmupCosineLr(std::move(base_lr), min_ratio, num_steps, cos_min_ratio, warmup_curve(curve),
                                   total_steps);
           }),
           "base_lr"_a, "min_ratio"_a, "num_steps"_a, "cos_min_ratio"_a, "curve"_a, "total_steps"_a)
      .def("ratio", &WarmupCosineLr::ratio)
      .def("lr", &WarmupCosineLr::lr);
  py::class_<LrRangeTest>(lr, "LrRangeTest")
      .def(py::init<PerGroup, int64_t, double, bool>(), "min_lr"_a, "step_size"_a, "step_rate"_a, "staircase"_a)
      .def("lr", &LrRangeTest::lr);
  py::class_<CycleShape>(lr, "CycleShape")
      .def(py::init([](int64_t first_steps, int64_t second_steps, int64_t first_stairs, int64_t second_stairs,
                       int64_t decay_steps) {
             return CycleShape{first_steps, second_steps, first_stairs, second_stairs, decay_steps};
           }),
           "first_steps"_a, "second_steps"_a, "first_stairs"_a, "second_stairs"_a, "decay_steps"_a);
  py::class_<OneCycleLr>(lr, "OneCycleLr")
      .def(py::init<PerGroup, PerGroup, double, CycleShape>(), "min_lr"_a, "max_lr"_a, "decay_rate"_a, "shape"_a)
      .def("lr", &OneCycleLr::lr);
  py::class_<OneCycleMomentum>(lr, "OneCycleMomentum")
      .def(py::init<PerGroup, PerGroup, double, CycleShape>(), "min_mom"_a, "max_mom"_a, "decay_rate"_a, "shape"_a)
      .def("momentum", &OneCycleMomentum::momentum);
}

}  // namespace ds::bindings
