// Learning-rate schedules: plain numbers in, one rate per parameter group out.
#include <pybind11/stl.h>

#include "bindings/registry.h"
#include "optim/lr_schedule.h"

namespace py = pybind11;
using namespace ds::optim;

DS_BINDINGS(m) {
  py::module_ lr = m.def_submodule("lr_schedules", "Schedules as functions of the iteration; see optim/lr_schedule.h.");
  py::class_<WarmupLr>(lr, "WarmupLr")
      .def(py::init([](PerGroup min_lr, PerGroup max_lr, int64_t num_steps, const std::string& curve) {
             return WarmupLr(std::move(min_lr), std::move(max_lr), num_steps, warmup_curve(curve));
           }),
           py::arg("min_lr"), py::arg("max_lr"), py::arg("num_steps"), py::arg("curve"))
      .def("lr", &WarmupLr::lr);
  py::class_<WarmupDecayLr>(lr, "WarmupDecayLr")
      .def(py::init([](PerGroup min_lr, PerGroup max_lr, int64_t num_steps, const std::string& curve,
                       int64_t total_steps) {
             return WarmupDecayLr(std::move(min_lr), std::move(max_lr), num_steps, warmup_curve(curve), total_steps);
           }),
           py::arg("min_lr"), py::arg("max_lr"), py::arg("num_steps"), py::arg("curve"), py::arg("total_steps"))
      .def("lr", &WarmupDecayLr::lr);
  py::class_<WarmupCosineLr>(lr, "WarmupCosineLr")
      .def(py::init([](PerGroup base_lr, double min_ratio, int64_t num_steps, double cos_min_ratio,
                       const std::string& curve, int64_t total_steps) {
             return WarmupCosineLr(std::move(base_lr), min_ratio, num_steps, cos_min_ratio, warmup_curve(curve),
                                   total_steps);
           }),
           py::arg("base_lr"), py::arg("min_ratio"), py::arg("num_steps"), py::arg("cos_min_ratio"), py::arg("curve"),
           py::arg("total_steps"))
      .def("ratio", &WarmupCosineLr::ratio)
      .def("lr", &WarmupCosineLr::lr);
  py::class_<LrRangeTest>(lr, "LrRangeTest")
      .def(py::init<PerGroup, int64_t, double, bool>(), py::arg("min_lr"), py::arg("step_size"), py::arg("step_rate"),
           py::arg("staircase"))
      .def("lr", &LrRangeTest::lr);
  py::class_<CycleShape>(lr, "CycleShape")
      .def(py::init([](int64_t first_steps, int64_t second_steps, int64_t first_stairs, int64_t second_stairs,
                       int64_t decay_steps) {
             return CycleShape{first_steps, second_steps, first_stairs, second_stairs, decay_steps};
           }),
           py::arg("first_steps"), py::arg("second_steps"), py::arg("first_stairs"), py::arg("second_stairs"),
           py::arg("decay_steps"));
  py::class_<OneCycleLr>(lr, "OneCycleLr")
      .def(py::init<PerGroup, PerGroup, double, CycleShape>(), py::arg("min_lr"), py::arg("max_lr"),
           py::arg("decay_rate"), py::arg("shape"))
      .def("lr", &OneCycleLr::lr);
  py::class_<OneCycleMomentum>(lr, "OneCycleMomentum")
      .def(py::init<PerGroup, PerGroup, double, CycleShape>(), py::arg("min_mom"), py::arg("max_mom"),
           py::arg("decay_rate"), py::arg("shape"))
      .def("momentum", &OneCycleMomentum::momentum);
}
