#include <Python.h>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>

#include "bindings/registry.h"
#include "comm/shm_backend.h"

namespace py = pybind11;

DS_BINDINGS(m) {
  py::module_::import("torch.distributed");  // registers the types below
  m.def("shm_backend", &ds::comm::shm_backend, py::call_guard<py::gil_scoped_release>(), py::arg("store"),
        py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("other"));
}
