// deepspeed._C.PipeChannel: messages between stages of a pipeline, csrc/comm/pipe/pipe_channel.h.
#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include "base/clock.h"
#include "bindings/registry.h"
#include "comm/communicator.h"
#include "comm/pipe/pipe_channel.h"

namespace py = pybind11;

namespace ds::bindings {

namespace {

using comm::PipeChannel;
using comm::PipeStream;
using Unlocked = py::call_guard<py::gil_scoped_release>;
using MaybeTensors = std::vector<c10::optional<at::Tensor>>;  // None: no tensor at this index

PipeStream stream_of(bool grads) { return grads ? PipeStream::kGrads : PipeStream::kActivations; }

std::shared_ptr<PipeChannel> make_channel(comm::CommunicatorPtr activations, comm::CommunicatorPtr grads,
                                          const plan::PipeShape& shape, const py::function& open_edge,
                                          const std::pair<std::string, std::string>& devices, int bound,
                                          milliseconds timeout) {
  const auto open = [&](const comm::PipeEdge& edge) {
    return open_edge(edge.stream == PipeStream::kGrads, edge.from, edge.to).cast<comm::CommunicatorPtr>();
  };
  // In a step that is planned nothing comes by itself.
  const c10::Device device(devices.first);
  const int ahead = device.is_meta() ? 0 : bound;
  return {new PipeChannel(std::move(activations), std::move(grads),
                          {device, c10::Device(devices.second), bound, ahead, /*direct=*/true, timeout},
                          {comm::pipe_edges(shape), open}),
          [](PipeChannel* channel) {
            if (!Py_IsInitialized() || !PyGILState_Check()) return delete channel;
            py::gil_scoped_release unlocked;  // its threads end first
            delete channel;
          }};
}

void send(PipeChannel& channel, bool grads, int to, const MaybeTensors& tensors, bool packed) {
  comm::PipeMessage message{std::vector<comm::PipePiece>(tensors.size()), packed};
  for (size_t index = 0; index < tensors.size(); ++index)
    if (tensors[index]) message.pieces[index] = {*tensors[index], tensors[index]->requires_grad()};
  channel.send(stream_of(grads), to, message);
}

std::pair<MaybeTensors, bool> recv(PipeChannel& channel, bool grads, int from) {
  MaybeTensors tensors;
  comm::PipeMessage message = channel.recv(stream_of(grads), from);
  for (comm::PipePiece& piece : message.pieces) {
    if (piece.wants_grad) piece.tensor.set_requires_grad(true);
    tensors.push_back(piece.tensor.defined() ? c10::optional<at::Tensor>(std::move(piece.tensor)) : c10::nullopt);
  }
  return {std::move(tensors), message.packed};
}

}  // namespace

DS_BINDINGS(m) {
  py::class_<PipeChannel, std::shared_ptr<PipeChannel>>(m, "PipeChannel")
      // `devices`: of tensors, and of notes. `open_edge(grads, from, to)` returns the Communicator of two stages.
      .def(py::init(&make_channel), py::kw_only(), "activations"_a, "grads"_a, "shape"_a, "open_edge"_a, "devices"_a,
           "bound"_a, "timeout"_a)
      .def(
          "expect",
          [](PipeChannel& channel, bool grads, int from, int64_t messages) {
            channel.expect(stream_of(grads), from, messages);
          },
          Unlocked(), "grads"_a, "from_"_a, "messages"_a)
      .def("send", &send, Unlocked(), "grads"_a, "to"_a, "tensors"_a, "packed"_a)
      // Activations that required gradients where they were sent require them here.
      .def("recv", &recv, Unlocked(), "grads"_a, "from_"_a)
      .def("begin", &PipeChannel::begin, "trains"_a, "The batch that this stage works on from now on.")
      .def("settle", &PipeChannel::settle, Unlocked())
      .def("abort", &PipeChannel::abort, Unlocked(), "why"_a)
      .def_property_readonly("failed", &PipeChannel::failed)
      .def_property_readonly("sent", [](const PipeChannel& channel) {
        return std::make_pair(channel.traffic().messages, channel.traffic().bytes);
      });
}

}  // namespace ds::bindings
