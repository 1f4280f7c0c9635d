// deepspeed._C.SignExchanges: the steps of an engine's optimizer whose ranks exchange signs
// (csrc/zero/step/compressed_step.h).
#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include <memory>
#include <utility>

#include "bindings/registry.h"
#include "bindings/torch_types.h"
#include "comm/communicator.h"
#include "zero/engine.h"

namespace py = pybind11;

namespace ds::bindings {

namespace {

struct SignExchanges {
  std::shared_ptr<zero::Engine> engine;

  zero::CompressedStep& steps() const { return engine->stepper().compressed(); }
  // Whether the next step leaves the variance as it is.
  bool frozen() const { return steps().phase(0) != nullptr && steps().phase(0)->frozen; }
};

// (what the values of this rank have lost, what it has lost as an owner), flat but for the first one; None before the
// first exchange.
py::object errors(const SignExchanges& exchanges, size_t param) {
  const auto [sent, owned] = exchanges.steps().errors(param);
  if (!sent.defined()) return py::none();
  return py::make_tuple(sent, owned);
}

// The weights of the last sync, or this rank's own again, are in the masters and in the model.
void show_common(const SignExchanges& exchanges, bool common) {
  exchanges.engine->failures().guard([&] {
    exchanges.engine->states().hold().wait();
    exchanges.steps().show_common(common);
    exchanges.engine->states().publish();
  });
}

}  // namespace

DS_BINDINGS(m) {
  py::class_<SignExchanges>(m, "SignExchanges")
      .def(py::init([](std::shared_ptr<zero::Engine> engine) { return SignExchanges{std::move(engine)}; }), "core"_a)
      .def_property_readonly(
          "active", [](const SignExchanges& exchanges) { return exchanges.steps().active(); },
          "Whether the optimizer has such steps.")
      .def_property_readonly(
          "local", [](const SignExchanges& exchanges) { return exchanges.steps().local(); },
          "Whether ranks keep their own gradients in the next step.")
      .def_property_readonly("frozen", &SignExchanges::frozen, "Whether the next step leaves the variance as it is.")
      .def_property_readonly(
          "apart", [](const SignExchanges& exchanges) { return exchanges.steps().apart(); },
          "Whether ranks have weights of their own.")
      .def("errors", &errors, "param"_a)
      .def(
          "zero_variances", [](const SignExchanges& exchanges) { return exchanges.steps().zero_variances(); },
          py::call_guard<py::gil_scoped_release>(),
          "Names of parameters without a mask of which a row has no variance.")
      .def(
          "set_mask",
          [](const SignExchanges& exchanges, size_t param, const c10::optional<at::Tensor>& mask) {
            exchanges.steps().set_mask(param, mask.value_or(at::Tensor()));
          },
          "param"_a, "mask"_a)
      .def(
          "use_ranks",
          [](const SignExchanges& exchanges, comm::CommunicatorPtr ranks) {
            exchanges.steps().use_ranks(std::move(ranks));
          },
          "communicator"_a)
      .def("show_common", &show_common, py::call_guard<py::gil_scoped_release>(), "common"_a);
}

}  // namespace ds::bindings
