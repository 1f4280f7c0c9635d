// The decisions of a ZeRO stage, read-only: csrc/zero/stage_policy.h.
#include "zero/stage_policy.h"

#include <pybind11/pybind11.h>

#include "bindings/registry.h"

namespace py = pybind11;

DS_BINDINGS(m) {
  using namespace ds::zero;
  py::class_<SavedForm>(m, "SavedForm")
      .def_readonly("model_by_rank", &SavedForm::model_by_rank)
      .def_readonly("optimizer_by_rank", &SavedForm::optimizer_by_rank)
      .def_readonly("frozen_listed", &SavedForm::frozen_listed);
  py::class_<StagePolicy>(m, "StagePolicy")
      .def_readonly("stage", &StagePolicy::stage)
      .def_property_readonly("shards_params", &StagePolicy::shards_params)
      .def_property_readonly("shards_grads", &StagePolicy::shards_grads)
      .def_property_readonly("shards_states", &StagePolicy::shards_states)
      .def_property_readonly("reduces_each_micro_step",
                             [](const StagePolicy& policy) { return policy.reduce == ReduceAt::kMicroStep; })
      .def_readonly("saved", &StagePolicy::saved);
  m.def("stage_policy", &stage_policy, py::return_value_policy::reference, "stage"_a);
}
