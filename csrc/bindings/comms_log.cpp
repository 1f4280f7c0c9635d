// Figures of the log of operations, for comm/comms_logger.py.
#include <Python.h>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/registry.h"
#include "comm/boards/call_figures.h"

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

std::optional<comm::Stragglers> stragglers_of(const comm::CallLog& log, const Everybody& everybody) {
  if (!everybody) return std::nullopt;
  return comm::stragglers(log, *everybody);
}

}  // namespace

DS_BINDINGS(m) {
  m.def("bandwidths", &comm::bandwidths, py::arg("name"), py::arg("size_bytes"), py::arg("ms"), py::arg("ranks"));
  m.def("readable_size", &comm::readable_size, py::arg("size_bytes"));
  m.def("trimmed_mean", &comm::trimmed_mean, py::arg("values"), py::arg("share") = 0.1);
  m.def("call_figures", &figures, py::arg("bytes"), py::arg("entry"));
  m.def(
      "call_stragglers",
      [](const comm::CallLog& log, const std::vector<comm::TimesByCall>& everybody) {
        py::dict made;
        for (const auto& [name, sizes] : comm::stragglers(log, everybody)) {
          py::dict by_size;
          for (const auto& [bytes, each] : sizes) by_size[py::int_(bytes)] = described(each);
          made[py::str(name)] = by_size;
        }
        return made;
      },
      py::arg("log"), py::arg("everybody"));
  m.def(
      "call_table",
      [](const comm::CallLog& log, const Everybody& everybody) {
        return comm::call_table(log, stragglers_of(log, everybody));
      },
      py::arg("log"), py::arg("everybody"));
}

}  // namespace ds::bindings
