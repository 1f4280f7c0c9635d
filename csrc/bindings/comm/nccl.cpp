// NCCL called directly, for deepspeed/comm/nccl.py.
#include <Python.h>

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "base/blocking_region.h"
#include "base/clock.h"
#include "base/error.h"
#include "bindings/registry.h"
#include "bindings/shared_function.h"
#include "comm/nccl/nccl_memory.h"
#include "comm/nccl/nccl_tensors.h"
#include "comm/transports/nccl_communicator.h"

namespace py = pybind11;

namespace ds::bindings {

namespace {

using comm::NcclLibrary;
using comm::NcclTensors;
using comm::Verb;
namespace nccl = comm::nccl;
using Unlocked = py::call_guard<py::gil_scoped_release>;

// Waiting for the device goes through Python's accelerator, from whatever thread lets go of the last tensor.
std::function<bool()> quiesce(py::function synchronize) {
  return [held = shared_function(std::move(synchronize))] {
    if (!Py_IsInitialized()) return false;
    py::gil_scoped_acquire locked;
    try {
      (*held)();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("waiting for the device of an NCCL communicator");
    }
    return true;
  };
}

// Tensors are freed under the interpreter's lock as a rule. A thread with the communicator's lock may wait for the
// interpreter's, so a thread with the interpreter's lock must not wait for the communicator's.
template <typename Held>
void let_go(Held& held) {
  in_blocking_region([&held] { held.reset(); });
}

at::Tensor bytes_of_buffer(std::shared_ptr<comm::NcclBuffer> buffer, const std::string& device) {
  void* data = buffer->data();
  const auto bytes = static_cast<int64_t>(buffer->bytes());
  const c10::Device target(device);
  return at::for_blob(data, {bytes})
      .deleter([buffer = std::move(buffer)](void*) mutable { let_go(buffer); })
      .target_device(target)
      .options(at::TensorOptions().dtype(at::kByte).device(target))
      .make_tensor();
}

nccl::UniqueId id_from(const std::string& text) {
  nccl::UniqueId id;
  if (text.size() != sizeof(id.bytes))
    fail(ErrorKind::kValue, "an NCCL id has ", sizeof(id.bytes), " bytes, not ", text.size());
  text.copy(id.bytes, sizeof(id.bytes));
  return id;
}

// Arguments, as calls name them: "all_reduce of world: tensor must be ...".
struct Caller {
  NcclTensors& self;
  const char* what;

  at::Tensor tensor(const py::handle& given, const char* name) const {
    if (THPVariable_Check(given.ptr())) return given.cast<at::Tensor>();
    fail(ErrorKind::kType, what, " of ", self.nccl().name(), ": ", name, " must be a tensor, not ",
         std::string(py::str(py::type::handle_of(given).attr("__name__"))), ".");
  }
  int rank(const py::handle& given, const char* name) const {
    const int size = self.nccl().size();
    if (PyLong_Check(given.ptr()) && !PyBool_Check(given.ptr())) {
      const auto rank = given.cast<int64_t>();
      if (rank >= 0 && rank < size) return static_cast<int>(rank);
    }
    fail(ErrorKind::kValue, what, " of ", self.nccl().name(), ": ", name, " is ", std::string(py::repr(given)),
         "; the ranks of this communicator are 0 to ", size - 1, " (they are those of its group, not of the job).");
  }
};

using Argument = std::optional<std::pair<const char*, py::object>>;  // its name and what was passed

void call(NcclTensors& self, comm::Verb verb, const Argument& in, const Argument& out, const Argument& peer = {},
          const std::string& reduction = "SUM", const std::vector<NcclTensors::Splits>& splits = {}) {
  const Caller from{self, comm::verb_name(verb)};
  std::optional<NcclTensors::Named> named_in, named_out;
  if (in) named_in = NcclTensors::Named{in->first, from.tensor(in->second, in->first)};
  if (out) named_out = NcclTensors::Named{out->first, from.tensor(out->second, out->first)};
  const int rank = peer ? from.rank(peer->second, peer->first) : -1;
  const py::gil_scoped_release unlocked;
  self.run(verb, named_in, named_out, rank, reduction, splits);
}

// A registration of memory that a tensor of Python's owns.
struct Registered {
  std::shared_ptr<comm::NcclRegistration> registration;
  ~Registered() { let_go(registration); }
};

}  // namespace

DS_BINDINGS(m) {
  py::class_<NcclLibrary, std::shared_ptr<NcclLibrary>>(m, "NcclLibrary")
      .def_static(
          "find",
          [](const std::vector<std::string>& candidates) {
            return std::const_pointer_cast<NcclLibrary>(NcclLibrary::find(candidates));
          },
          "candidates"_a, Unlocked())
      .def_static(
          "open", [](const std::string& path) { return std::const_pointer_cast<NcclLibrary>(NcclLibrary::open(path)); },
          "path"_a, Unlocked())
      .def_property_readonly("path", &NcclLibrary::path)
      .def_property_readonly("version", &NcclLibrary::version)
      .def_property_readonly("version_text", &NcclLibrary::version_text)
      .def_property_readonly("has_buffers", &NcclLibrary::has_buffers)
      .def("make_id", [](const NcclLibrary& library) {
        const nccl::UniqueId id = library.make_id();
        return py::bytes(id.bytes, sizeof(id.bytes));
      });

  py::class_<Registered>(m, "NcclRegistration").def("release", [](Registered& held) { let_go(held.registration); });

  using Given = const py::object&;
  using Splits = NcclTensors::Splits;
  using Released = py::gil_scoped_release;
  py::class_<NcclTensors, std::shared_ptr<NcclTensors>>(m, "NcclCommunicator")
      .def(py::init([](const std::shared_ptr<NcclLibrary>& library, const std::string& id, std::string name, int rank,
                       int size, milliseconds timeout, py::function synchronize, const std::string& device) {
             comm::NcclMember member;
             member.name = std::move(name);
             member.rank = rank;
             member.size = size;
             member.timeout = timeout;
             member.quiesce = quiesce(std::move(synchronize));
             const c10::Device target(device);
             if (!target.is_cpu())
               member.on_device = [target](const std::function<void()>& body) {
                 const c10::DeviceGuard current(target);
                 body();
               };
             const Released unlocked;
             auto joined = comm::NcclComm::join(library, id_from(id), std::move(member));
             auto calls = comm::nccl_communicator_alone(joined);
             return std::make_shared<NcclTensors>(std::move(joined), std::move(calls), target);
           }),
           "library"_a, "id"_a, "name"_a, "rank"_a, "size"_a, "timeout"_a, "synchronize"_a, "device"_a)
      .def_property_readonly("closed",
                             [](NcclTensors& self) {
                               const Released unlocked;
                               return self.nccl().closed();
                             })
      .def("all_reduce",
           [](NcclTensors& self, Given tensor, Given out, const std::string& op) {
             call(self, Verb::kAllReduce, {{"tensor", tensor}}, {{"out", out}}, {}, op);
           })
      .def("reduce",
           [](NcclTensors& self, Given tensor, Given dst, const std::string& op) {
             call(self, Verb::kReduce, {}, {{"tensor", tensor}}, {{"dst", dst}}, op);
           })
      .def("broadcast",
           [](NcclTensors& self, Given tensor, Given src) {
             call(self, Verb::kBroadcast, {}, {{"tensor", tensor}}, {{"src", src}});
           })
      .def("all_gather",
           [](NcclTensors& self, Given output, Given tensor) {
             call(self, Verb::kAllGather, {{"tensor", tensor}}, {{"output", output}});
           })
      .def("reduce_scatter",
           [](NcclTensors& self, Given output, Given tensor, const std::string& op) {
             call(self, Verb::kReduceScatter, {{"tensor", tensor}}, {{"output", output}}, {}, op);
           })
      .def("send",
           [](NcclTensors& self, Given tensor, Given dst) {
             call(self, Verb::kSend, {{"tensor", tensor}}, {}, {{"dst", dst}});
           })
      .def("recv",
           [](NcclTensors& self, Given tensor, Given src) {
             call(self, Verb::kRecv, {}, {{"tensor", tensor}}, {{"src", src}});
           })
      .def("all_to_all",
           [](NcclTensors& self, Given output, Given tensor, const Splits& taken, const Splits& given) {
             call(self, Verb::kAllToAll, {{"tensor", tensor}}, {{"output", output}}, {}, "SUM", {taken, given});
           })
      .def("begin_group", &NcclTensors::begin_group)
      .def("end_group", &NcclTensors::end_group, "launch"_a, Unlocked())
      .def(
          "check", [](NcclTensors& self) { self.nccl().check(); }, Unlocked())
      .def(
          "abort", [](NcclTensors& self, const std::string& reason) { self.nccl().abort(reason); }, Unlocked())
      .def(
          "close", [](NcclTensors& self) { self.nccl().close(); }, Unlocked())
      .def(
          "leave", [](NcclTensors& self) { self.nccl().leave(); }, Unlocked())
      .def(
          "allocate",
          [](NcclTensors& self, size_t bytes, const std::string& device) {
            return bytes_of_buffer(std::make_shared<comm::NcclBuffer>(self.pointer(), bytes), device);
          },
          "bytes"_a, "device"_a, Unlocked())
      .def("register_memory", [](NcclTensors& self, Given tensor) {
        const at::Tensor memory = Caller{self, "register"}.tensor(tensor, "tensor");
        const Released unlocked;
        self.check_registered(memory);
        return std::make_unique<Registered>(
            Registered{std::make_shared<comm::NcclRegistration>(self.pointer(), memory.data_ptr(), memory.nbytes())});
      });
  m.def("nccl_types", &comm::nccl_types);  // names of torch's dtypes
}

}  // namespace ds::bindings
