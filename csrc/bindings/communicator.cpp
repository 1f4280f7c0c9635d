// A group of ranks as the native engine uses it. Python makes one from a process group, hands it to an engine and keeps
// it to read its log.
#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <optional>

#include "bindings/registry.h"
#include "bindings/sharded_params.h"
#include "bindings/without_lock.h"
#include "comm/communicator.h"
#include "comm/transports/shm_communicator.h"

namespace py = pybind11;

namespace ds::bindings {

DS_BINDINGS(m) {
  using comm::Communicator;
  py::class_<Communicator, std::shared_ptr<Communicator>>(m, "Communicator")
      .def(py::init([](const py::object& group, bool shared, std::chrono::milliseconds timeout,
                       const std::optional<comm::GroupFacts>& facts) {
             auto made = communicator(group);
             py::gil_scoped_release unlocked;
             const comm::GroupFacts unknown{"", -1, nullptr, without_lock};
             return shared ? comm::shm_communicator(std::move(made), timeout, facts.value_or(unknown)) : made;
           }),
           py::arg("group"), py::arg("shared") = false, py::arg("timeout") = std::chrono::milliseconds(30 * 60 * 1000),
           py::arg("facts") = py::none())
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("name", &Communicator::name)
      .def("leave", &Communicator::leave, py::call_guard<py::gil_scoped_release>())
      .def("log_calls", &Communicator::log_calls, py::arg("on"))
      .def("take_log", [](Communicator& communicator) {
        std::vector<std::tuple<std::string, int64_t, double>> calls;
        for (const comm::LoggedCall& call : communicator.take_log()) calls.emplace_back(call.op, call.bytes, call.ms);
        return calls;
      });
}

}  // namespace ds::bindings
