// deepspeed._C.SignExchange: one exchange of signs without an engine (csrc/comm/compressed/sign_exchange.h), and signs
// as bytes. caller_communicator: one whose exchanges of bytes a Python function makes.
#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>

#include "base/error.h"
#include "bindings/registry.h"
#include "bindings/shared_function.h"
#include "comm/calls/work.h"
#include "comm/compressed/sign_exchange.h"
#include "zero/device_context.h"

namespace py = pybind11;

namespace ds::bindings {

namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

// Exchanges by call("all_to_all" or "all_gather", in, out), which returns when `out` is there.
class CallerCommunicator : public comm::Communicator {
 public:
  CallerCommunicator(int rank, int size, std::string name, const py::function& call)
      : rank_(rank), size_(size), name_(std::move(name)), call_(shared_function(call)) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string name() const override { return name_; }
  bool carries(const comm::Op& op) const override {
    const bool even = op.in_counts.empty() && op.out_counts.empty() && op.parts == nullptr && op.more == nullptr;
    return even && (op.verb == comm::Verb::kAllToAll || op.verb == comm::Verb::kAllGather);
  }
  comm::PeerMemoryPtr peer_memory(int64_t) override { return nullptr; }

 protected:
  comm::WorkPtr start(const comm::Op& op) override {
    const py::gil_scoped_acquire locked;
    (*call_)(comm::verb_name(op.verb), op.in, op.out);
    return std::make_shared<comm::DoneWork>();
  }

 private:
  const int rank_, size_;
  const std::string name_;
  const std::shared_ptr<py::function> call_;
};

// Exchanges of the values of one device.
class Exchanges {
 public:
  Exchanges(comm::CommunicatorPtr ranks, const std::string& device, int threads)
      : ranks_(std::move(ranks)), device_(c10::Device(device), threads) {}

  // `values`, contiguous fp32 of any shape, become their mean over the ranks, with one scale.
  void mean(const at::Tensor& values, const at::Tensor& errors, const at::Tensor& owned_errors) {
    const int64_t numel = values.numel(), slice = (numel + ranks_->size() - 1) / ranks_->size();
    check("buffer_m", values, numel);
    check("worker_error", errors, numel);
    check("server_error", owned_errors, slice);
    const comm::SignExchange exchange(ranks_, {{0, numel, 0}}, false, [this](const comm::SignExchange::Call& call) {
      device_.run([&](const kernels::Launch& launch) { call(device_.codes(), launch); });
    });
    exchange.mean(values.view({-1}), errors.view({-1}), owned_errors.view({-1}), "compressed_allreduce");
    device_.check();
  }

  at::Tensor pack(const at::Tensor& values) {
    const at::Tensor flat = values.to(at::kFloat).contiguous(), none = at::ones({1}, flat.options());
    const at::Tensor bytes = at::empty({(flat.numel() + 7) / 8}, flat.options().dtype(at::kByte));
    const kernels::SignRun run = {flat.data_ptr<float>(), nullptr, static_cast<size_t>(flat.numel()),
                                  bytes.data_ptr<uint8_t>(), none.data_ptr<float>()};
    device_.run([&](const kernels::Launch& launch) { device_.codes().encode_signs(launch, &run, 1); });
    return bytes;
  }

  // 1 or -1 for each bit, a row for each byte.
  at::Tensor unpack(const at::Tensor& bytes) {
    if (bytes.scalar_type() != at::kByte)
      fail(ErrorKind::kValue, "unpack needs a uint8 tensor, not ", bytes.toString());
    const at::Tensor own = bytes.contiguous(), out = at::empty({own.numel(), 8}, own.options().dtype(at::kFloat));
    const int64_t numel = out.numel();
    const at::Tensor one = at::ones({1}, out.options());
    const kernels::SignSum run = {
        out.data_ptr<float>(), static_cast<size_t>(numel), own.data_ptr<uint8_t>(), one.data_ptr<float>(), 1, 0};
    device_.run([&](const kernels::Launch& launch) { device_.codes().decode_signs(launch, &run, 1, 1.0f); });
    return out;
  }

 private:
  void check(const char* name, const at::Tensor& tensor, int64_t least) const {
    if (tensor.scalar_type() == at::kFloat && tensor.is_contiguous() && tensor.device() == device_.device() &&
        tensor.numel() >= least)
      return;
    fail(ErrorKind::kValue, "compressed_allreduce: ", name, " must be a contiguous fp32 tensor on ",
         device_.device().str(), " with at least ", least, " elements, not ", tensor.toString(), " ", tensor.sizes());
  }

  const comm::CommunicatorPtr ranks_;
  zero::DeviceContext device_;
};

}  // namespace

DS_BINDINGS(m) {
  m.def(
      "caller_communicator",
      [](int rank, int size, std::string name, const py::function& call) -> comm::CommunicatorPtr {
        return std::make_shared<CallerCommunicator>(rank, size, std::move(name), call);
      },
      "rank"_a, "size"_a, "name"_a, "call"_a,
      "A communicator whose exchanges of bytes a function makes: call('all_to_all' or 'all_gather', in, out).");
  py::class_<Exchanges>(m, "SignExchange")
      .def(py::init<comm::CommunicatorPtr, const std::string&, int>(), "communicator"_a, "device"_a, "threads"_a)
      .def("mean", &Exchanges::mean, Unlocked(), "values"_a, "errors"_a, "owned_errors"_a)
      .def("pack", &Exchanges::pack, Unlocked(), "values"_a)
      .def("unpack", &Exchanges::unpack, Unlocked(), "bytes"_a);
}

}  // namespace ds::bindings
