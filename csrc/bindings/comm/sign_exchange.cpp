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
      .def("mean", &Exchanges::mean, Unlocked(), "values"_a, "errors"_a, "owned_errors"_a);
}

}  // namespace ds::bindings
