// NCCL called directly. Python checks tensors and passes addresses, counts and the stream; only memory of NCCL's own
// crosses as a tensor.
#include <Python.h>

#include <ATen/Functions.h>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/registry.h"
#include "bindings/shared_function.h"
#include "bindings/without_lock.h"
#include "comm/nccl_comm.h"
#include "comm/nccl_memory.h"

namespace py = pybind11;

namespace ds::bindings {

namespace {

using comm::NcclComm;
using comm::NcclLibrary;
namespace nccl = comm::nccl;
using Unlocked = py::call_guard<py::gil_scoped_release>;

// NOLINTNEXTLINE(performance-no-int-to-ptr): data_ptr() and cuda_stream are numbers in Python
void* address(uintptr_t number) { return reinterpret_cast<void*>(number); }

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

// Tensors die under the interpreter's lock as a rule. Whoever holds the communicator's lock may wait for the
// interpreter's, so nobody may wait for the former with the latter.
template <typename Held>
void let_go(Held& held) {
  without_lock([&held] { held.reset(); });
}

at::Tensor bytes_of(std::shared_ptr<comm::NcclBuffer> buffer, const std::string& device) {
  void* data = buffer->data();
  const auto bytes = static_cast<int64_t>(buffer->bytes());
  const c10::Device place(device);
  return at::for_blob(data, {bytes})
      .deleter([buffer = std::move(buffer)](void*) mutable { let_go(buffer); })
      .target_device(place)
      .options(at::TensorOptions().dtype(at::kByte).device(place))
      .make_tensor();
}

nccl::UniqueId id_from(const std::string& text) {
  nccl::UniqueId id;
  if (text.size() != sizeof(id.bytes))
    fail(ErrorKind::kValue, "an NCCL id has ", sizeof(id.bytes), " bytes, not ", text.size());
  text.copy(id.bytes, sizeof(id.bytes));
  return id;
}

// A registration of memory that a tensor of Python's owns.
struct Registered {
  std::shared_ptr<comm::NcclRegistration> registration;
  ~Registered() { let_go(registration); }
};

}  // namespace

DS_BINDINGS(m) {
  py::enum_<nccl::DataType>(m, "NcclType")
      .value("int8", nccl::kInt8)
      .value("uint8", nccl::kUint8)
      .value("int32", nccl::kInt32)
      .value("uint32", nccl::kUint32)
      .value("int64", nccl::kInt64)
      .value("uint64", nccl::kUint64)
      .value("float16", nccl::kFloat16)
      .value("float32", nccl::kFloat32)
      .value("float64", nccl::kFloat64)
      .value("bfloat16", nccl::kBfloat16)
      .value("float8_e4m3fn", nccl::kFloat8E4M3)
      .value("float8_e5m2", nccl::kFloat8E5M2);
  py::enum_<nccl::RedOp>(m, "NcclOp")
      .value("SUM", nccl::kSum)
      .value("PRODUCT", nccl::kProd)
      .value("MAX", nccl::kMax)
      .value("MIN", nccl::kMin)
      .value("AVG", nccl::kAvg);

  py::class_<NcclLibrary, std::shared_ptr<NcclLibrary>>(m, "NcclLibrary")
      .def_static(
          "find",
          [](const std::vector<std::string>& candidates) {
            return std::const_pointer_cast<NcclLibrary>(NcclLibrary::find(candidates));
          },
          py::arg("candidates"), Unlocked())
      .def_static(
          "open", [](const std::string& path) { return std::const_pointer_cast<NcclLibrary>(NcclLibrary::open(path)); },
          py::arg("path"), Unlocked())
      .def_property_readonly("path", &NcclLibrary::path)
      .def_property_readonly("version", &NcclLibrary::version)
      .def_property_readonly("version_text", &NcclLibrary::version_text)
      .def_property_readonly("has_buffers", &NcclLibrary::has_buffers)
      .def("make_id", [](const NcclLibrary& library) {
        const nccl::UniqueId id = library.make_id();
        return py::bytes(id.bytes, sizeof(id.bytes));
      });

  py::class_<Registered>(m, "NcclRegistration").def("release", [](Registered& held) { let_go(held.registration); });

  py::class_<NcclComm, std::shared_ptr<NcclComm>>(m, "NcclCommunicator")
      .def(py::init([](const std::shared_ptr<NcclLibrary>& library, const std::string& id, std::string name, int rank,
                       int size, std::chrono::milliseconds timeout, py::function synchronize) {
             comm::NcclPlace place;
             place.name = std::move(name);
             place.rank = rank;
             place.size = size;
             place.timeout = timeout;
             place.quiesce = quiesce(std::move(synchronize));
             py::gil_scoped_release unlocked;
             return NcclComm::join(library, id_from(id), std::move(place));
           }),
           py::arg("library"), py::arg("id"), py::arg("name"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
           py::arg("synchronize"))
      .def_property_readonly("closed", py::cpp_function(&NcclComm::closed, Unlocked()))
      .def(
          "all_reduce",
          [](NcclComm& self, uintptr_t in, uintptr_t out, size_t count, nccl::DataType type, nccl::RedOp op,
             uintptr_t stream) { self.all_reduce(address(in), address(out), count, type, op, address(stream)); },
          Unlocked())
      .def(
          "reduce",
          [](NcclComm& self, uintptr_t in, uintptr_t out, size_t count, nccl::DataType type, nccl::RedOp op,
             int root,
             uintptr_t stream) { self.reduce(address(in), address(out), count, type, op, root, address(stream)); },
          Unlocked())
      .def(
          "broadcast",
          [](NcclComm& self, uintptr_t in, uintptr_t out, size_t count, nccl::DataType type, int root,
             uintptr_t stream) { self.broadcast(address(in), address(out), count, type, root, address(stream)); },
          Unlocked())
      .def(
          "all_gather",
          [](NcclComm& self, uintptr_t in, uintptr_t out, size_t count, nccl::DataType type, uintptr_t stream) {
            self.all_gather(address(in), address(out), count, type, address(stream));
          },
          Unlocked())
      .def(
          "reduce_scatter",
          [](NcclComm& self, uintptr_t in, uintptr_t out, size_t count, nccl::DataType type, nccl::RedOp op,
             uintptr_t stream) { self.reduce_scatter(address(in), address(out), count, type, op, address(stream)); },
          Unlocked())
      .def(
          "send",
          [](NcclComm& self, uintptr_t in, size_t count, nccl::DataType type, int peer, uintptr_t stream) {
            self.send(address(in), count, type, peer, address(stream));
          },
          Unlocked())
      .def(
          "recv",
          [](NcclComm& self, uintptr_t out, size_t count, nccl::DataType type, int peer, uintptr_t stream) {
            self.recv(address(out), count, type, peer, address(stream));
          },
          Unlocked())
      .def(
          "all_to_all",
          [](NcclComm& self, uintptr_t in, const std::vector<size_t>& in_counts, uintptr_t out,
             const std::vector<size_t>& out_counts, nccl::DataType type, uintptr_t stream) {
            self.all_to_all(address(in), in_counts, address(out), out_counts, type, address(stream));
          },
          Unlocked())
      .def(
          "exchange_packed",
          [](NcclComm& self, uintptr_t in, uintptr_t in_scales, std::vector<size_t> in_bytes,
             std::vector<size_t> in_counts, uintptr_t out, uintptr_t out_scales, std::vector<size_t> out_bytes,
             std::vector<size_t> out_counts, nccl::DataType scale_type, uintptr_t stream) {
            self.exchange_packed({address(in), address(in_scales), std::move(in_bytes), std::move(in_counts)},
                                 {address(out), address(out_scales), std::move(out_bytes), std::move(out_counts)},
                                 scale_type, address(stream));
          },
          Unlocked())
      .def(
          "gather_packed",
          [](NcclComm& self, uintptr_t bytes, size_t chunk_bytes, uintptr_t scales, size_t chunk_scales,
             uintptr_t all_bytes, uintptr_t all_scales, nccl::DataType scale_type, uintptr_t stream) {
            self.gather_packed(address(bytes), chunk_bytes, address(scales), chunk_scales, address(all_bytes),
                               address(all_scales), scale_type, address(stream));
          },
          Unlocked())
      .def(
          "grouped",
          [](NcclComm& self, const std::vector<py::function>& calls) {
            py::gil_scoped_release unlocked;
            self.grouped([&] {
              py::gil_scoped_acquire locked;
              for (const py::function& call : calls) call();
            });
          },
          py::arg("calls"))
      .def("check", &NcclComm::check, Unlocked())
      .def("abort", &NcclComm::abort, py::arg("reason"), Unlocked())
      .def("close", &NcclComm::close, Unlocked())
      .def("leave", &NcclComm::leave, Unlocked())
      .def(
          "allocate",
          [](const std::shared_ptr<NcclComm>& self, size_t bytes, const std::string& device) {
            return bytes_of(std::make_shared<comm::NcclBuffer>(self, bytes), device);
          },
          py::arg("bytes"), py::arg("device"), Unlocked())
      .def(
          "register_memory",
          [](const std::shared_ptr<NcclComm>& self, uintptr_t data, size_t bytes) {
            return std::make_unique<Registered>(
                Registered{std::make_shared<comm::NcclRegistration>(self, address(data), bytes)});
          },
          py::arg("data"), py::arg("bytes"), Unlocked());
}

}  // namespace ds::bindings
