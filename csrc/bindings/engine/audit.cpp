// deepspeed._C.Audit: csrc/zero/gradients/audit.h.
#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include "bindings/registry.h"
#include "bindings/shared_function.h"
#include "bindings/engine/sharded_params.h"
#include "zero/gradients/audit.h"

namespace py = pybind11;

namespace {

using ds::zero::Audit;
using ds::zero::AuditedStep;
using ds::zero::States;

using Unlocked = py::call_guard<py::gil_scoped_release>;
using Row = std::tuple<std::string, std::map<std::string, double>, double>;

}  // namespace

DS_BINDINGS(m) {
  py::class_<Audit>(m, "Audit")
      .def(py::init([](const std::shared_ptr<ds::zero::Engine>& engine, const py::object& ranks, int rank,
                       double tolerance, const py::function& update) {
             auto call = [held = ds::bindings::shared_function(update)](int32_t group, const at::Tensor& weight,
                                                                        const at::Tensor& grad, const States& states,
                                                                        double step) {
               py::gil_scoped_acquire locked;
               return (*held)(group, weight, grad, states, step).cast<at::Tensor>();
             };
             return std::make_unique<Audit>(engine, ranks.is_none() ? nullptr : ds::bindings::communicator(ranks), rank,
                                            tolerance, std::move(call));
           }),
           "engine"_a, "ranks"_a, "rank"_a, "tolerance"_a, "update"_a)
      .def("add", &Audit::add, "param"_a, "grad"_a)
      .def("forget", &Audit::forget)
      .def(
          "before_step",
          [](Audit& audit, int64_t number, double loss_scale, double clip, bool average,
             const std::vector<Row>& groups) {
            AuditedStep step{number, loss_scale, clip, average, {}};
            for (const auto& [rule, hyper, magnification] : groups) step.groups.push_back({rule, hyper, magnification});
            audit.before_step(std::move(step));
          },
          Unlocked(), py::kw_only(), "number"_a, "loss_scale"_a, "clip"_a, "average"_a, "groups"_a)
      .def("after_step", &Audit::after_step, Unlocked(), "stepped"_a, "norm"_a);
}
