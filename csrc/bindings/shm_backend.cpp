#include <Python.h>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <optional>

#include "bindings/registry.h"
#include "bindings/without_lock.h"
#include "comm/shared_memory/shm_backend.h"

namespace py = pybind11;

DS_BINDINGS(m) {
  py::module_::import("torch.distributed");  // registers the types below
  m.def(
      "shm_backend",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout,
         ds::comm::BackendPtr other, const std::optional<ds::comm::GroupFacts>& facts) {
        const ds::comm::GroupFacts unknown{"", -1, nullptr, nullptr, ds::bindings::without_lock};
        return ds::comm::shm_backend(store, rank, size, timeout, std::move(other), facts.value_or(unknown));
      },
      py::call_guard<py::gil_scoped_release>(), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
      py::arg("other").none(true), py::arg("facts") = py::none());
  m.def("shares_memory", &ds::comm::shares_memory, py::arg("backend"));
}
