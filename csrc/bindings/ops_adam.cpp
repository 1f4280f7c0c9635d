// Adam over torch tensors: checks and gathers them into segments, then makes one kernel call.
#include <torch/csrc/utils/pybind.h>

#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <pybind11/stl.h>

#include <map>
#include <tuple>

#include "base/error.h"
#include "base/thread_pool.h"
#include "bindings/registry.h"
#include "kernels/stream.h"
#include "kernels/table.h"

namespace py = pybind11;

namespace ds::bindings {
namespace {

using kernels::AdamArgs;
using kernels::AdamSegment;
using kernels::KernelTable;
using Tensors = std::vector<at::Tensor>;

DType dtype_of(const at::Tensor& t, const char* what) {
  switch (t.scalar_type()) {
    case at::kFloat: return DType::kF32;
    case at::kHalf: return DType::kF16;
    case at::kBFloat16: return DType::kBF16;
    default: break;
  }
  fail(ErrorKind::kType, "Adam works on fp32, fp16 and bf16 tensors, but ", what, " is ", t.toString(),
       ". Convert the parameter (for example with .float()) before the optimizer is made.");
}

const KernelTable& table_for(const at::Device& device) {
  const char* name = device.is_cpu() ? "cpu" : device.is_cuda() ? "cuda" : nullptr;
  if (name == nullptr)
    fail(ErrorKind::kRuntime, "there are no Adam kernels for tensors on ", device.str(),
         "; move them to the CPU or a CUDA device");
  const KernelTable* table = ds_kernels(kernels::kKernelAbi, name);
  if (table == nullptr) fail(ErrorKind::kRuntime, ds_kernels_error(kernels::kKernelAbi, name));
  return *table;
}

// Everything one optimizer object keeps between steps: its worker threads.
class AdamKernel {
 public:
  // One update of params[i] by grads[i] for all i, which lie on one device. exp_avgs and exp_avg_sqs are in fp32 or in
  // the parameter's dtype, and all tensors with index i have one shape. `stream` is the cudaStream_t of that device.
  void step(Tensors params, const Tensors& grads, Tensors exp_avgs, Tensors exp_avg_sqs, double lr, double beta1,
            double beta2, double eps, double weight_decay, bool adamw, double bias_correction1, double bias_correction2,
            int threads, uintptr_t stream) {
    if (params.empty()) return;
    kept_.clear();
    written_.clear();  // of a call that failed
    const at::Device device = params[0].device();
    const KernelTable& table = table_for(device);
    using Dtypes = std::tuple<DType, DType, DType>;  // parameter, state, gradient
    std::map<Dtypes, std::vector<AdamSegment>> groups;
    for (size_t i = 0; i < params.size(); ++i) {
      at::Tensor &p = params[i], &m = exp_avgs[i], &v = exp_avg_sqs[i];
      at::Tensor g = grads[i];
      check(i, p, g, m, v, device);
      if (p.numel() == 0) continue;
      p = dense(p, p);
      m = dense(m, p);
      v = dense(v, p);
      g = dense(g, p, false);
      groups[{dtype_of(p, "a parameter"), dtype_of(m, "exp_avg"), dtype_of(g, "a gradient")}].push_back(
          {p.data_ptr(), m.data_ptr(), v.data_ptr(), g.data_ptr(), nullptr, static_cast<size_t>(p.numel())});
    }
    {
      py::gil_scoped_release no_gil;
      const c10::DeviceGuard guard(device);
      const kernels::Launch launch = {device.is_cpu() ? pool(threads) : nullptr, reinterpret_cast<void*>(stream)};
      for (const auto& [dtypes, segments] : groups) {
        AdamArgs args = {
            lr,         beta1, beta2, eps, weight_decay, bias_correction1, bias_correction2, adamw, std::get<2>(dtypes),
            DType::kF32};
        args.master_dtype = std::get<0>(dtypes);
        args.state_dtype = std::get<1>(dtypes);
        table.adam(launch, segments.data(), segments.size(), args, nullptr);
      }
      if (const char* error = table.last_error())
        fail(ErrorKind::kRuntime, "the Adam kernel failed on ", device.str(), ": ", error);
    }
    for (auto& [strided, copy] : written_) strided.copy_(copy);
    kept_.clear();
    written_.clear();
    // Autograd must notice when a tensor that it saved for a backward has changed.
    for (const at::Tensor& p : params)
      if (!p.is_inference()) p.unsafeGetTensorImpl()->bump_version();
  }

  // The loads and stores of Adam without its arithmetic, for benchmarks: fp32 tensors of one size on the CPU.
  void memory_bound(const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
                    const at::Tensor& exp_avg_sq, int threads) {
    kernels::Stream stream;
    for (const at::Tensor* t : {&param, &grad, &exp_avg, &exp_avg_sq})
      if (!t->is_cpu() || t->scalar_type() != at::kFloat || !t->is_contiguous() || t->numel() != param.numel())
        fail(ErrorKind::kValue, "memory_bound takes four contiguous fp32 CPU tensors of one size");
    stream.read = grad.data_ptr<float>();
    stream.update[0] = param.data_ptr<float>();
    stream.update[1] = exp_avg.data_ptr<float>();
    stream.update[2] = exp_avg_sq.data_ptr<float>();
    stream.n = static_cast<size_t>(param.numel());
    py::gil_scoped_release no_gil;
    ds_cpu_stream({pool(threads), nullptr}, stream);
  }

 private:
  static void check(size_t i, const at::Tensor& p, const at::Tensor& g, const at::Tensor& m, const at::Tensor& v,
                    const at::Device& device) {
    if (g.layout() != at::kStrided)
      fail(ErrorKind::kRuntime, "Adam does not take sparse gradients, but tensor ", i,
           " of this call has one. Make the "
           "layer dense (nn.Embedding(..., sparse=False)) or use an optimizer for sparse gradients "
           "(torch.optim.SparseAdam).");
    for (const at::Tensor* t : {&g, &m, &v}) {
      if (t->sizes() != p.sizes())
        fail(ErrorKind::kValue, "parameter ", i, " has shape ", p.sizes(), ", but its gradient or Adam state has ",
             t->sizes(), ". Did the state come from another model?");
      if (t->device() != device)
        fail(ErrorKind::kRuntime, "parameter ", i, " is on ", device.str(), ", but its gradient or Adam state is on ",
             t->device().str(), ".");
    }
  }

  // `t` itself where its memory is laid out as `p`'s and dense; else a copy that is, to be written back if `write`.
  at::Tensor dense(const at::Tensor& t, const at::Tensor& p, bool write = true) {
    if (t.is_non_overlapping_and_dense() && t.strides() == p.strides()) return t;
    at::Tensor copy = at::empty_like(p, t.options());
    copy.copy_(t);
    if (write) written_.emplace_back(t, copy);
    kept_.push_back(copy);
    return copy;
  }

  ThreadPool* pool(int threads) {
    if (!pool_ || pool_->threads() != threads) pool_ = std::make_unique<ThreadPool>(threads);
    return pool_.get();
  }

  std::unique_ptr<ThreadPool> pool_;
  std::vector<std::pair<at::Tensor, at::Tensor>> written_;  // during a step: (strided original, dense copy)
  Tensors kept_;                                            // copies that must outlive the kernel call
};

}  // namespace
}  // namespace ds::bindings

DS_BINDINGS(m) {
  using ds::bindings::AdamKernel;
  py::class_<AdamKernel>(m, "AdamKernel", "Adam over lists of tensors, with worker threads of its own.")
      .def(py::init<>())
      .def("step", &AdamKernel::step, py::arg("params"), py::arg("grads"), py::arg("exp_avgs"), py::arg("exp_avg_sqs"),
           py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"), py::arg("adamw"),
           py::arg("bias_correction1"), py::arg("bias_correction2"), py::arg("threads"), py::arg("stream") = 0)
      .def("memory_bound", &AdamKernel::memory_bound, py::arg("param"), py::arg("grad"), py::arg("exp_avg"),
           py::arg("exp_avg_sq"), py::arg("threads"));
}
