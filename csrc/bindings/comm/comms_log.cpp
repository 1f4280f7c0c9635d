// The log of operations, for comm/comms_log.py, and its figures, for comm/comms_logger.py.
#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/registry.h"
#include "bindings/shared_function.h"
#include "comm/boards/call_figures.h"
#include "comm/c10d_compat.h"
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

comm::CallRecorder::Caller name_of_caller(py::function function) {
  return [held = shared_function(std::move(function))]() -> std::string {
    if (!Py_IsInitialized()) return "";
    py::gil_scoped_acquire locked;
    return py::cast<std::string>((*held)());
  };
}

comm::TorchCalls::Numbered number_of_call(py::function function) {
  return [held = shared_function(std::move(function))](const comm::TorchCalls::Group& group) {
    std::pair<std::string, int64_t> found{"", -1};
    if (!Py_IsInitialized()) return found;
    py::gil_scoped_acquire locked;
    return (*held)(group).cast<decltype(found)>();
  };
}

}  // namespace

DS_BINDINGS(m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  // Times are those of time.perf_counter(), which on Linux is the same clock.
  using Call = comm::LoggedCall;
  py::class_<Call>(m, "LoggedCall")
      .def_readonly("op", &Call::op)
      .def_readonly("label", &Call::label)
      .def_readonly("caller", &Call::caller)
      .def_readonly("bytes", &Call::bytes)
      .def_readonly("ranks", &Call::ranks)
      .def_readonly("tag", &Call::tag)
      .def_readonly("group", &Call::group)
      .def_readonly("number", &Call::number)
      .def_readonly("begin", &Call::begin)
      .def_readonly("end", &Call::end)
      .def_readonly("blocked", &Call::blocked);
  // caller: a function that names the function that makes the current call; None: names are not wanted.
  using RecorderPtr = std::shared_ptr<comm::CallRecorder>;
  py::class_<comm::CallRecorder, RecorderPtr>(m, "CallRecorder")
      .def(py::init([](bool waits, const std::optional<py::function>& caller) {
             return std::make_shared<comm::CallRecorder>(waits, caller ? name_of_caller(*caller) : nullptr);
           }),
           "waits"_a, "caller"_a = py::none())
      .def("take", &comm::CallRecorder::take);
  py::class_<comm::CallLog, comm::CallLogPtr>(m, "CallLog")
      .def(py::init<>())
      .def_property_readonly("on", &comm::CallLog::on)
      .def_property_readonly("records", &comm::CallLog::records)
      .def_property_readonly("waits", &comm::CallLog::waits)
      .def("add", &comm::CallLog::add<RecorderPtr>, "listener"_a, Unlocked())
      .def("add", &comm::CallLog::add<comm::StepWaitsPtr>, "listener"_a, Unlocked())
      .def("remove", &comm::CallLog::remove<RecorderPtr>, "listener"_a, Unlocked())
      .def("remove", &comm::CallLog::remove<comm::StepWaitsPtr>, "listener"_a, Unlocked())
      .def(
          "ended",
          [](comm::CallLog& log, std::string op, std::string label, int64_t bytes, int ranks, std::string group,
             int64_t number, double begin, double blocked, bool waited) {
            log.ended({std::move(op), "", bytes, ranks, std::move(label), "", std::move(group), number, begin,
                       comm::seconds_now(), blocked},
                      waited);
          },
          "op"_a, "label"_a, "bytes"_a, "ranks"_a, "group"_a, "number"_a, "begin"_a, "blocked"_a, "waited"_a,
          Unlocked())
      .def("enter", [](comm::CallLog& log) { return log.enter(); })
      .def("leave", [](comm::CallLog& log) { log.leave(); });
  // numbered: a function of a ProcessGroup that returns the group and the number of a call that begins on it.
  py::class_<comm::TorchCalls>(m, "TorchCalls")
      .def(py::init([](comm::CallLogPtr log, py::function numbered) {
             return std::make_unique<comm::TorchCalls>(std::move(log), number_of_call(std::move(numbered)));
           }),
           "log"_a, "numbered"_a);
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
