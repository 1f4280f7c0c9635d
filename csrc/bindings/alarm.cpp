// deepspeed._C.Alarm: one failure ends the waits of all ranks of a pipeline's engine, csrc/comm/alarm.h.
#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include "bindings/registry.h"
#include "comm/alarm.h"
#include "comm/decorators/logged.h"
#include "comm/pipe_channel.h"

namespace py = pybind11;

namespace ds::bindings {

namespace {

using comm::Alarm;
using LoggedPtr = std::shared_ptr<comm::LoggedCommunicator>;

// `channel` and `groups` are held weakly: the alarm is told to whatever of them is still there.
std::shared_ptr<Alarm> make_alarm(c10::intrusive_ptr<c10d::Store> store, int rank, std::vector<std::string> names,
                                  const std::shared_ptr<comm::PipeChannel>& channel,
                                  const std::vector<LoggedPtr>& groups, const comm::GroupFacts& facts,
                                  std::pair<std::vector<std::string>, std::vector<std::string>> places, int keeper) {
  std::weak_ptr<comm::PipeChannel> messages = channel;
  std::vector<std::weak_ptr<comm::LoggedCommunicator>> others(groups.begin(), groups.end());
  py::gil_scoped_release unlocked;
  const auto told = [=](const std::string& why) {
    if (const auto here = messages.lock()) here->abort(why);
    for (const auto& other : others)
      if (const auto here = other.lock()) here->bare().abort(why);  // every rank hears of it from the alarm
  };
  auto alarm = std::make_shared<Alarm>(std::move(store), rank, std::move(names), told,
                                       comm::PlaceNames{std::move(places.first), std::move(places.second)}, keeper);
  if (facts.store_watch) facts.store_watch->add(alarm);
  return alarm;
}

}  // namespace

DS_BINDINGS(m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  // Its memory: three integers (csrc/comm/place_page.h).
  py::class_<comm::PlacePage, std::shared_ptr<comm::PlacePage>>(m, "PlacePage", py::buffer_protocol())
      .def_buffer([](comm::PlacePage& page) { return py::buffer_info(page.words(), comm::PlacePage::kWords); });
  py::class_<Alarm, std::shared_ptr<Alarm>>(m, "Alarm")
      .def(py::init(&make_alarm), py::kw_only(), py::arg("store"), py::arg("rank"), py::arg("names"),
           py::arg("channel"), py::arg("groups"), py::arg("facts"), py::arg("places"), py::arg("keeper"))
      .def("begin", &Alarm::begin)
      .def("end", &Alarm::end)
      .def("ring", &Alarm::ring, Unlocked(), py::arg("why"))
      .def("await_all", &Alarm::await_all, Unlocked())
      .def("goodbye", &Alarm::goodbye, Unlocked())
      .def_property_readonly("heard", &Alarm::heard)
      .def_property_readonly("place", [](const Alarm& alarm) { return alarm.place(); })
      .def_property_readonly("where", &Alarm::where);
}

}  // namespace ds::bindings
