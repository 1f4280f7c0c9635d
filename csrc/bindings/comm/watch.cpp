// The watch over the communicators of a process. The core gets the interpreter, to report the line that runs.
#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "base/blocking_region.h"
#include "base/process.h"
#include "bindings/registry.h"
#include "bindings/shared_function.h"
#include "comm/calls/reduce_op.h"
#include "comm/segments/shared_segments.h"
#include "comm/boards/store_keeper.h"
#include "comm/boards/watch.h"
#include "comm/decorators/call_log.h"

namespace py = pybind11;

namespace ds::bindings {

namespace {

py::dict described(const comm::Watched& group, const comm::Flight& flight) {
  const comm::Record& call = flight.call;
  py::dict made;
  made["group"] = group.name();
  made["transport"] = group.transport();
  made["call"] = comm::describe(call);
  made["number"] = flight.number;
  made["op"] = std::string(call.what);
  made["tag"] = std::string(call.tag);
  made["dtype"] = call.type >= 0 ? py::object(py::str(comm::type_name(call.type))) : py::none();
  made["numel"] = call.numel;
  made["reduction"] =
      call.op >= 0 ? py::object(py::str(comm::reduce_op_name(static_cast<comm::ReduceOp>(call.op)))) : py::none();
  made["root"] = call.root >= 0 ? py::object(py::int_(call.root)) : py::none();
  made["began"] = comm::epoch_seconds(flight.begin_us);
  made["seconds"] =
      flight.end_us ? py::object(py::float_(static_cast<double>(flight.end_us - flight.begin_us) * 1e-6)) : py::none();
  made["state"] = flight.end_us ? "done" : "under way";
  return made;
}

}  // namespace

DS_BINDINGS(m) {
  using comm::Watch;
  m.def("process_ended", &process_ended, "pid"_a);
  m.def("process_began", &process_began, "pid"_a);
  m.def("host_id", &comm::host_id);  // equal for processes that may share memory and know each other's numbers
  py::class_<Watch, std::shared_ptr<Watch>>(m, "Watch")
      .def(py::init([](py::function stacks, py::function warn) {
             comm::DiagnosticCallbacks callbacks;
             callbacks.stacks = [held = shared_function(std::move(stacks))] {
               py::gil_scoped_acquire locked;
               try {
                 return (*held)().cast<std::string>();
               } catch (const py::error_already_set& error) {
                 return std::string("(its stack could not be read: ") + error.what() + ")";
               }
             };
             callbacks.warn = [held = shared_function(std::move(warn))](const std::string& text) {
               py::gil_scoped_acquire locked;
               try {
                 (*held)(text);
               } catch (py::error_already_set& error) {
                 error.discard_as_unraisable("a warning of deepspeed.comm");
               }
             };
             return std::shared_ptr<Watch>(new Watch(std::move(callbacks)), [](Watch* watch) {
               if (watch->here()) in_blocking_region([watch] { delete watch; });
             });
           }),
           "stacks"_a, "warn"_a)
      .def("flights",
           [](const Watch& watch) {
             py::list all;
             for (const auto& group : watch.groups())
               for (const comm::Flight& flight : group->flights()) all.append(described(*group, flight));
             return all;
           })
      .def("stop", &Watch::stop, py::call_guard<py::gil_scoped_release>());
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<comm::StoreKeeper>(m, "StoreKeeper")
      .def(py::init<c10::intrusive_ptr<c10d::Store>, int, int>(), "store"_a, "rank"_a, "world"_a, Unlocked())
      .def("goodbye", &comm::StoreKeeper::goodbye, Unlocked())
      .def_property_readonly("said_goodbye", &comm::StoreKeeper::said_goodbye)
      .def("wait", &comm::StoreKeeper::wait, Unlocked());
  py::class_<comm::GroupFacts>(m, "GroupFacts")
      .def(py::init([](std::string name, int job_rank, std::shared_ptr<Watch> watch, std::shared_ptr<Watch> stores,
                       std::shared_ptr<comm::CallLog> log) {
             return comm::GroupFacts{std::move(name), job_rank, std::move(watch), std::move(stores), std::move(log)};
           }),
           "name"_a, "job_rank"_a, "watch"_a, "store_watch"_a, "log"_a);
}

}  // namespace ds::bindings
