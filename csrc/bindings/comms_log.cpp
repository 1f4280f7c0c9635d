// The log of operations, for comm/comms_log.py, and its figures, for comm/comms_logger.py.
#include <Python.h>

#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/registry.h"
#include "bindings/shared_function.h"
#include "comm/boards/call_figures.h"
#include "comm/decorators/call_log.h"
#include "comm/decorators/torch_calls.h"

namespace py = pybind11;

namespace ds::bindings {

namespace {

py::dict figures(int64_t bytes, const comm::CallEntry& entry) {
  const comm::CallFigures found(entry);
  py::dict made;
  made["count"] = found.count;
  made["total_latency_ms"] = found.total_ms;
  made["avg_latency_ms"] = found.average_ms;
  made["tput_avg_gbps"] = found.algorithm;
  made["busbw_avg_gbps"] = found.bus;
  made["msg_size_bytes"] = bytes;
  made["msg_size_str"] = comm::readable_size(static_cast<double>(bytes));
  return made;
}

py::dict described(const comm::Straggler& found) {
  py::dict made;
  made["count"] = found.count;
  made["total_comm_lat_ms"] = found.total_ms;
  made["total_straggler_ms"] = found.total_waited_ms;
  made["avg_comm_lat_ms"] = found.average_ms;
  made["avg_straggler_ms"] = found.average_waited_ms;
  made["ranks_compared"] = found.ranks;
  return made;
}

// None: not asked for. Else the times of every rank.
using Everybody = std::optional<std::vector<comm::TimesByCall>>;

std::optional<comm::Stragglers> stragglers_of(const comm::CallTotals& log, const Everybody& everybody) {
  if (!everybody) return std::nullopt;
  return comm::stragglers(log, *everybody);
}

comm::CallLog::Caller name_of_caller(py::function function) {
  return [held = shared_function(std::move(function))]() -> std::string {
    if (!Py_IsInitialized()) return "";
    py::gil_scoped_acquire locked;
    return py::cast<std::string>((*held)());
  };
}

}  // namespace

DS_BINDINGS(m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<comm::CallLog, comm::CallLogPtr>(m, "CallLog")
      .def(py::init<>())
      .def_property_readonly("on", &comm::CallLog::on)
      // caller: a function that names the function that makes the current call; None: names are not wanted.
      .def(
          "turn",
          [](comm::CallLog& log, bool on, const std::optional<py::function>& caller) {
            comm::CallLog::Caller native;
            if (caller) native = name_of_caller(*caller);
            const py::gil_scoped_release unlocked;
            log.turn(on, std::move(native));
          },
          "on"_a, "caller"_a = py::none())
      .def(
          "add",
          [](comm::CallLog& log, std::string op, std::string label, int64_t bytes, double ms, int ranks) {
            log.add({std::move(op), "", bytes, ms, ranks, std::move(label)});
          },
          "op"_a, "label"_a, "bytes"_a, "ms"_a, "ranks"_a, Unlocked())
      // (op, label, caller, bytes, ms, ranks) of each call since the last take.
      .def("take",
           [](comm::CallLog& log) {
             std::vector<std::tuple<std::string, std::string, std::string, int64_t, double, int>> calls;
             for (const comm::LoggedCall& call : log.take())
               calls.emplace_back(call.op, call.label, call.caller, call.bytes, call.ms, call.ranks);
             return calls;
           })
      .def("enter", [](comm::CallLog& log) { return log.enter(); })
      .def("leave", [](comm::CallLog& log) { log.leave(); });
  py::class_<comm::TorchCalls>(m, "TorchCalls").def(py::init<comm::CallLogPtr>(), "log"_a, Unlocked());
  m.def("bandwidths", &comm::bandwidths, "name"_a, "size_bytes"_a, "ms"_a, "ranks"_a);
  m.def("readable_size", &comm::readable_size, "size_bytes"_a);
  m.def("trimmed_mean", &comm::trimmed_mean, "values"_a, "share"_a = 0.1);
  m.def("call_figures", &figures, "bytes"_a, "entry"_a);
  m.def(
      "call_stragglers",
      [](const comm::CallTotals& log, const std::vector<comm::TimesByCall>& everybody) {
        py::dict made;
        for (const auto& [name, sizes] : comm::stragglers(log, everybody)) {
          py::dict by_size;
          for (const auto& [bytes, each] : sizes) by_size[py::int_(bytes)] = described(each);
          made[py::str(name)] = by_size;
        }
        return made;
      },
      "log"_a, "everybody"_a);
  m.def(
      "call_table",
      [](const comm::CallTotals& log, const Everybody& everybody) {
        return comm::call_table(log, stragglers_of(log, everybody));
      },
      "log"_a, "everybody"_a);
}

}  // namespace ds::bindings
