// deepspeed._C.partition_uniform and partition_balanced: csrc/plan/partition.h.
#include "plan/partition.h"

#include <pybind11/stl.h>

#include "bindings/registry.h"

DS_BINDINGS(m) {
  m.def("partition_uniform", &ds::plan::partition_uniform, pybind11::arg("items"), pybind11::arg("parts"));
  m.def("partition_balanced", &ds::plan::partition_balanced, pybind11::arg("weights"), pybind11::arg("parts"));
}
