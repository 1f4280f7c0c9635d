// deepspeed._C.ErrorPropagation: one failure ends the waits of all ranks of a pipeline's engine.
#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include "bindings/registry.h"
#include "comm/boards/error_propagation.h"
#include "comm/communicator.h"
#include "comm/pipe/pipe_channel.h"

namespace py = pybind11;

namespace ds::bindings {

namespace {

using comm::ErrorPropagation;

// `channel` and `groups` are held weakly: an error aborts those that still exist.
std::shared_ptr<ErrorPropagation> make_error_propagation(
    c10::intrusive_ptr<c10d::Store> store, int rank, std::vector<std::string> names,
    const std::shared_ptr<comm::PipeChannel>& channel, const std::vector<comm::CommunicatorPtr>& groups,
    const comm::GroupFacts& facts, std::pair<std::vector<std::string>, std::vector<std::string>> position_names,
    int keeper) {
  std::weak_ptr<comm::PipeChannel> messages = channel;
  std::vector<std::weak_ptr<comm::Communicator>> others(groups.begin(), groups.end());
  py::gil_scoped_release unlocked;
  const auto abort_all = [=](const std::string& why) {
    if (const auto here = messages.lock()) here->abort(why);
    for (const auto& other : others)
      if (const auto here = other.lock()) here->bare().abort(why);  // every rank gets the error by itself
  };
  auto propagation = std::make_shared<ErrorPropagation>(
      std::move(store), rank, std::move(names), abort_all,
      comm::PositionNames{std::move(position_names.first), std::move(position_names.second)}, keeper);
  if (facts.store_watch) facts.store_watch->add(propagation);
  return propagation;
}

}  // namespace

DS_BINDINGS(m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  // Its memory: three integers (csrc/comm/boards/position_page.h).
  py::class_<comm::PositionPage, std::shared_ptr<comm::PositionPage>>(m, "PositionPage", py::buffer_protocol())
      .def_buffer([](comm::PositionPage& page) { return py::buffer_info(page.words(), comm::PositionPage::kWords); });
  py::class_<ErrorPropagation, std::shared_ptr<ErrorPropagation>>(m, "ErrorPropagation")
      .def(py::init(&make_error_propagation), py::kw_only(), "store"_a, "rank"_a, "names"_a, "channel"_a, "groups"_a,
           "facts"_a, "position_names"_a, "keeper"_a)
      .def("begin", &ErrorPropagation::begin)
      .def("end", &ErrorPropagation::end)
      .def("report", &ErrorPropagation::report, Unlocked(), "why"_a)
      .def("await_delivery", &ErrorPropagation::await_delivery, Unlocked())
      .def("leave", &ErrorPropagation::leave, Unlocked())
      .def_property_readonly("error", &ErrorPropagation::error)
      .def_property_readonly("position", [](const ErrorPropagation& propagation) { return propagation.position(); })
      .def_property_readonly("where", &ErrorPropagation::where);
}

}  // namespace ds::bindings
