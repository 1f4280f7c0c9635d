// Native optimizers over torch tensors, outside an engine: checks and gathers them into segments, then makes one kernel
// call for each pass.
#include <torch/csrc/utils/pybind.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/stl.h>

#include <map>
#include <mutex>
#include <tuple>

#include "base/error.h"
#include "base/thread_pool.h"
#include "bindings/ops/optimizer_rules.h"
#include "bindings/registry.h"
#include "comm/nccl/native_stream.h"
#include "kernels/code_book.h"
#include "kernels/stream.h"
#include "kernels/sum_order.h"
#include "kernels/table.h"
#include "zero/any_kernels.h"
#include "zero/step/newton_schulz.h"
#include "zero/torch_scratch.h"

namespace py = pybind11;

namespace ds::bindings {
namespace {

using kernels::KernelTable;
using kernels::UpdateArgs;
using kernels::UpdateSegment;
using Tensors = std::vector<at::Tensor>;

const KernelTable& table_for(const at::Device& device, const std::string& title) {
  try {
    return zero::kernels_of(device);
  } catch (const Error& error) {
    fail(error.kind(), "there are no kernels of ", title, " for tensors on ", device.str(), ": ", error.what());
  }
}

// One native optimizer and everything one optimizer object keeps between steps: its worker threads.
class UpdateRunner {
 public:
  UpdateRunner(const std::string& rule, std::string title) : rule_(optim::find_rule(rule)), title_(std::move(title)) {}

  // One update of params[i] by grads[i] for all i, which lie on one device; `step` is its number, from 1. states[k][i]
  // is slot k of params[i], in fp32 or in the parameter's dtype; all tensors with index i have one shape. With a
  // `seed`, bf16 results are rounded at random, params[i] by random numbers of its own, streams[i].
  void step(Tensors params, const Tensors& grads, std::vector<Tensors> states,
            const std::map<std::string, double>& hyper, double step, int threads, c10::optional<uint64_t> seed,
            const std::vector<uint64_t>& streams) {
    if (params.empty()) return;
    std::unique_lock busy(mutex_, std::defer_lock);
    {
      py::gil_scoped_release unlocked;  // another thread's step may be waiting for it
      busy.lock();
    }
    kept_.clear();
    written_.clear();  // of a call that failed
    if (states.size() != rule_.slots.size())
      fail(ErrorKind::kValue, title_, " has ", rule_.slots.size(), " states, not ", states.size());
    const std::vector<double> values = hyper_values(rule_, hyper);
    const at::Device device = params[0].device();
    const KernelTable& table = table_for(device, title_);
    using Dtypes = std::tuple<DType, DType, DType>;  // parameter, state, gradient
    std::map<Dtypes, std::vector<UpdateSegment>> groups;
    at::Tensor sums, scratch;
    make_room(params, sums, scratch);
    Tensors matrices;  // the scratch of each parameter, in its shape, where the rule orthogonalises
    int64_t done = 0;
    for (size_t i = 0; i < params.size(); ++i) {
      at::Tensor& p = params[i];
      at::Tensor g = grads[i];
      Tensors own;
      for (Tensors& slot : states) own.push_back(slot.at(i));
      check(i, p, g, own, device);
      if (p.numel() == 0) continue;
      UpdateSegment segment;
      p = dense(p, p);
      g = dense(g, p, false);
      segment.master = p.data_ptr();
      segment.grad = g.data_ptr();
      segment.numel = static_cast<size_t>(p.numel());
      segment.stream = streams.empty() ? i : streams.at(i);
      DType state_dtype = DType::kF32;
      for (size_t k = 0; rule_.packed && k < own.size(); ++k) segment.states[k] = packed(own[k], k, p);
      for (size_t k = 0; !rule_.packed && k < own.size(); ++k) {
        const at::Tensor state = dense(own[k], p);
        const DType dtype = dtype_of(state, "a state");
        if (k > 0 && dtype != state_dtype)
          fail(ErrorKind::kType, title_, ": the states of parameter ", i, " have different dtypes");
        state_dtype = dtype;
        segment.states[k] = state.data_ptr();
      }
      if (sums.defined()) segment.sums = sums.data_ptr<double>() + static_cast<int64_t>(i) * rule_.sums;
      if (scratch.defined()) segment.scratch = scratch.data_ptr<float>() + done;
      if (rule_.orthogonalises()) matrices.push_back(scratch.as_strided(p.sizes(), p.strides(), done));
      done += p.numel();
      groups[{dtype_of(p, "a parameter"), state_dtype, dtype_of(g, "a gradient")}].push_back(segment);
    }
    {
      py::gil_scoped_release no_gil;
      const c10::DeviceGuard guard(device);
      at::Tensor reserved;  // allocated before the first kernel changes anything
      if (!device.is_cpu() && rule_.sums > 0) {
        size_t blocks = 0;
        for (const at::Tensor& p : params) blocks += kernels::sum_blocks(static_cast<size_t>(p.numel()));
        reserved = at::empty({static_cast<int64_t>(blocks * kernels::kSumScratchBytes)},
                             at::TensorOptions().device(device).dtype(at::kByte));
      }
      zero::TorchScratch memory(device, reserved);
      kernels::Launch launch = {device.is_cpu() ? pool(threads) : nullptr, nullptr, &memory};
      if (!device.is_cpu())
        launch.stream = comm::native_stream(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
      for (size_t pass = 0; pass < rule_.passes.size(); ++pass) {
        for (const auto& [dtypes, segments] : groups) {
          UpdateArgs args;
          std::tie(args.master_dtype, args.state_dtype, args.grad_dtype) = dtypes;
          args.stochastic = seed.has_value();
          args.seed = seed.value_or(0);
          optim::run_pass(table, launch, rule_, rule_.passes[pass], segments, args, values, step, nullptr);
        }
        if (rule_.passes[pass].orthogonalises) {
          const auto iteration = zero::NewtonSchulz::of(optim::Values(rule_.hyper, values.data()));
          for (const at::Tensor& matrix : matrices) iteration.apply(matrix);
        }
      }
      if (!memory.error().empty()) fail(ErrorKind::kRuntime, title_, ": ", memory.error());
      if (const char* error = table.last_error())
        fail(ErrorKind::kRuntime, "the kernel of ", title_, " failed on ", device.str(), ": ", error);
    }
    sums_ = sums;
    for (auto& [strided, copy] : written_) strided.copy_(copy);
    kept_.clear();
    written_.clear();
    // Autograd must notice when a tensor that it saved for a backward has changed.
    for (const at::Tensor& p : params)
      if (!p.is_inference()) p.unsafeGetTensorImpl()->bump_version();
  }

  // The sums of the last step() over whole parameters: fp64, a row for each; undefined where the rule makes none.
  c10::optional<at::Tensor> sums() const { return sums_.defined() ? c10::optional<at::Tensor>(sums_) : c10::nullopt; }

  // The loads and stores of a rule without its arithmetic, for benchmarks: fp32 tensors on the CPU, cut and spread over
  // threads as in step(). With no `params` the gradients are read and that is all.
  void memory_bound(const Tensors& params, const Tensors& grads, const std::vector<Tensors>& states, int threads) {
    std::vector<kernels::Stream> streams(grads.size());
    const auto data = [&](const at::Tensor& t, size_t i) {
      if (!t.is_cpu() || t.scalar_type() != at::kFloat || !t.is_contiguous() || t.numel() != grads[i].numel())
        fail(ErrorKind::kValue, "memory_bound takes contiguous fp32 CPU tensors of one size");
      return t.data_ptr<float>();
    };
    if (states.size() > 2) fail(ErrorKind::kValue, "memory_bound takes at most two states");
    for (size_t i = 0; i < grads.size(); ++i) {
      streams[i].numel = static_cast<size_t>(grads[i].numel());
      streams[i].read = data(grads[i], i);
      if (params.empty()) continue;
      streams[i].update[0] = data(params.at(i), i);
      for (size_t k = 0; k < states.size(); ++k) streams[i].update[1 + k] = data(states[k].at(i), i);
    }
    py::gil_scoped_release no_gil;
    ds_cpu_stream({pool(threads), nullptr}, streams.data(), streams.size());
  }

 private:
  DType dtype_of(const at::Tensor& t, const char* what) const {
    switch (t.scalar_type()) {
      case at::kFloat: return DType::kF32;
      case at::kHalf: return DType::kF16;
      case at::kBFloat16: return DType::kBF16;
      default: break;
    }
    fail(ErrorKind::kType, title_, " works on fp32, fp16 and bf16 tensors, but ", what, " is ", t.toString(),
         ". Convert the parameter (for example with .float()) before the optimizer is made.");
  }

  void make_room(const Tensors& params, at::Tensor& sums, at::Tensor& scratch) const {
    const auto options = params[0].options().requires_grad(false);
    if (rule_.sums > 0) sums = at::zeros({static_cast<int64_t>(params.size()), rule_.sums}, options.dtype(at::kDouble));
    int64_t numel = 0;
    for (const at::Tensor& p : params) numel += p.numel();
    if (rule_.scratch) scratch = at::empty({numel}, options.dtype(at::kFloat));
  }

  void check(size_t i, const at::Tensor& p, const at::Tensor& g, const Tensors& states,
             const at::Device& device) const {
    if (g.layout() != at::kStrided)
      fail(ErrorKind::kRuntime, title_, " does not take sparse gradients, but tensor ", i,
           " of this call has one. Make the "
           "layer dense (nn.Embedding(..., sparse=False)) or use an optimizer for sparse gradients "
           "(torch.optim.SparseAdam).");
    const auto agree = [&](const at::Tensor& t) {
      if (t.sizes() != p.sizes())
        fail(ErrorKind::kValue, "parameter ", i, " has shape ", p.sizes(), ", but its gradient or ", title_,
             " state has ", t.sizes(), ". Did the state come from another model?");
      if (t.device() != device)
        fail(ErrorKind::kRuntime, "parameter ", i, " is on ", device.str(), ", but its gradient or ", title_,
             " state is on ", t.device().str(), ".");
    };
    agree(g);
    for (const at::Tensor& state : states)
      if (!rule_.packed) agree(state);
  }

  // The memory of slot k of 8-bit states: codes, codes, maxima, maxima.
  void* packed(const at::Tensor& state, size_t k, const at::Tensor& p) const {
    const auto numel = static_cast<size_t>(p.numel());
    const size_t wanted = k < 2 ? numel : kernels::code_blocks(numel);
    if (state.scalar_type() != (k < 2 ? at::kByte : at::kFloat) || !state.is_contiguous() ||
        state.device() != p.device() || static_cast<size_t>(state.numel()) != wanted || !p.is_contiguous())
      fail(ErrorKind::kValue, title_, ": state '", rule_.slots[k], "' of a parameter of shape ", p.sizes(), " is ",
           state.toString(), " of shape ", state.sizes(), " on ", state.device().str(),
           "; it does not belong to this parameter");
    return state.data_ptr();
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

  const optim::Rule& rule_;
  const std::string title_;  // for messages
  std::unique_ptr<ThreadPool> pool_;
  std::mutex mutex_;  // one step at a time: all below belongs to it
  at::Tensor sums_;
  std::vector<std::pair<at::Tensor, at::Tensor>> written_;  // during a step: (strided original, dense copy)
  Tensors kept_;                                            // copies that must outlive the kernel call
};

}  // namespace
}  // namespace ds::bindings

DS_BINDINGS(m) {
  using ds::bindings::UpdateRunner;
  py::class_<UpdateRunner>(m, "UpdateRunner",
                           "A native optimizer over lists of tensors, with worker threads of its own.")
      .def(py::init<const std::string&, std::string>(), "rule"_a, "title"_a)
      .def("step", &UpdateRunner::step, "params"_a, "grads"_a, "states"_a, "hyper"_a, "step"_a, "threads"_a,
           "seed"_a = py::none(), "streams"_a = std::vector<uint64_t>())
      .def("sums", &UpdateRunner::sums)
      .def("memory_bound", &UpdateRunner::memory_bound, "params"_a, "grads"_a, "states"_a, "threads"_a);
}
