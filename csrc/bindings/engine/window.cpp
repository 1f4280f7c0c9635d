// deepspeed._C.Window: csrc/zero/gradients/window.h.
#include <Python.h>

#include <pybind11/stl.h>

#include <memory>
#include <optional>

#include "bindings/registry.h"
#include "zero/gradients/window.h"

namespace ds::bindings {

namespace {

using zero::Window;

// The steps, the loss scale and the weight of this micro-batch as they are now.
void tell(Window& window, int64_t accumulation_steps, double loss_scale, double weight) {
  window.facts().accumulation_steps = accumulation_steps;
  window.facts().loss_scale = loss_scale;
  window.facts().weight = weight;
  window.facts().answered.reset();
}

// The engine's own method answers so. It may have been replaced by a script or a subclass.
void answer_boundary(Window& window, bool boundary) {
  if (boundary != window.at_boundary()) window.facts().answered = boundary;
}

void set_boundary(Window& window, std::optional<bool> by_hand) {
  window.facts().by_hand = by_hand;
  window.facts().answered.reset();
}

template <typename Value, Value zero::WindowFacts::*kFact>
void fact(pybind11::class_<Window, std::shared_ptr<Window>>& bound, const char* name) {
  bound.def_property(
      name, [](const Window& window) { return window.facts().*kFact; },
      [](Window& window, Value value) { window.facts().*kFact = value; });
}

template <auto kCount>
void count(pybind11::class_<Window, std::shared_ptr<Window>>& bound, const char* name) {
  bound.def_property_readonly(name, [](const Window& window) { return (window.counts().*kCount)(); });
}

}  // namespace

DS_BINDINGS(m) {
  using zero::MicroSteps;
  using zero::WindowFacts;
  pybind11::class_<Window, std::shared_ptr<Window>> bound(m, "Window");
  bound.def(pybind11::init<>())
      .def("tell", &tell, "accumulation_steps"_a, "loss_scale"_a, "weight"_a)
      .def("answer_boundary", &answer_boundary, "boundary"_a)
      .def("set_boundary", &set_boundary, "by_hand"_a)
      .def("begin_step", &Window::begin_step)
      .def("fail_step", &Window::fail_step)
      .def("end_step", &Window::end_step, "boundary"_a)
      .def("close_step", &Window::close_step)
      .def("restart", &Window::restart)
      .def_property_readonly("at_boundary", &Window::at_boundary)
      .def_property_readonly("reduces", &Window::reduces)
      .def_property_readonly("needs_join", &Window::needs_join)
      .def_property_readonly("micro_batches", &Window::micro_batches)
      .def_property_readonly("last_micro_batches", &Window::last_micro_batches)
      .def_property(
          "micro_steps", [](const Window& window) { return window.counts().total(); },
          [](Window& window, int64_t total) { window.counts().set_total(total); });
  fact<bool, &WindowFacts::managed>(bound, "managed");
  fact<bool, &WindowFacts::scheduled>(bound, "scheduled");
  fact<bool, &WindowFacts::no_sync>(bound, "no_sync");
  fact<bool, &WindowFacts::in_backward>(bound, "reduces_in_backward");
  fact<bool, &WindowFacts::scaled>(bound, "scaled");
  fact<double, &WindowFacts::outside_factor>(bound, "outside_factor");
  count<&MicroSteps::window_begin>(bound, "begin");
  count<&MicroSteps::index>(bound, "index");
  count<&MicroSteps::has_forward>(bound, "has_forward");
  count<&MicroSteps::has_own_backward>(bound, "has_own_backward");
  count<&MicroSteps::reached>(bound, "reached");
  count<&MicroSteps::trained>(bound, "trained");
}

}  // namespace ds::bindings
