#include "zero/any_kernels.h"

#include <ATen/Functions.h>
#include <ATen/ScalarOps.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "kernels/adagrad.h"
#include "kernels/adam.h"
#include "kernels/code_book.h"
#include "kernels/onebit_lamb.h"
#include "kernels/lion.h"
#include "kernels/sgd.h"
#include "zero/any_entry.h"
#include "zero/torch_scratch.h"

// An operation of a formula is one operation of torch, in fp32, so that it is rounded as in kernels/ref: what torch
// fuses (lerp, addcmul) is rounded otherwise on some devices. Runs of elements bound the scratch of a call.
namespace ds::zero {

const kernels::KernelTable& cpu_library() {
  const kernels::KernelTable* table = ds_cpu_kernels(kernels::kKernelAbi);
  if (table == nullptr) fail(ErrorKind::kRuntime, ds_cpu_kernels_error(kernels::kKernelAbi));
  return *table;
}

namespace any {

at::Tensor array_at(const void* data, at::ScalarType type, int64_t n, const c10::Device& device) {
  const auto options = at::TensorOptions().dtype(type).device(device);
  return at::for_blob(const_cast<void*>(data), {n}).options(options).target_device(device).make_tensor();
}

namespace {

using kernels::Segment;
using kernels::StepScale;
using kernels::UpdateArgs;
using kernels::UpdateSegment;

constexpr int64_t kHostRun = 16384;               // elements: on the host no launch costs time, and caches save it
constexpr int64_t kDeviceScratch = 64ll << 20;    // bytes
constexpr int64_t kAlign = 64, kMostArrays = 16;  // of the scratch of a run
constexpr int64_t kMostElementBytes = 64;         // of scratch, for each element

// Errors of this thread: the one since the last call of last_error(), and the text that this call returned.
thread_local std::string found_failure, told_failure;

at::ScalarType torch_type(DType dtype) {
  constexpr at::ScalarType kNarrow[] = {at::kHalf, at::kBFloat16};
  if (dtype_bytes(dtype) == 2) return kNarrow[dtype == DType::kBF16];
  return dtype == DType::kF64 ? at::kDouble : at::kFloat;
}

at::Tensor array_from(const void* data, DType dtype, int64_t begin, int64_t n, const c10::Device& device) {
  const auto offset = static_cast<size_t>(begin) * dtype_bytes(dtype);
  return array_at(static_cast<const char*>(data) + offset, torch_type(dtype), n, device);
}

at::Tensor number(float value) { return at::native::wrapped_scalar_tensor(value); }

// The scratch of one run, given away in arrays.
struct RunScratch {
  char* next;
  c10::Device device;

  at::Tensor take(at::ScalarType type, int64_t n) {
    char* const data = next;
    next += (n * static_cast<int64_t>(c10::elementSize(type)) + kAlign - 1) / kAlign * kAlign;
    return array_at(data, type, n, device);
  }
};

struct Run {
  size_t segment;
  int64_t begin, numel;
};

// The runs of all segments, in each of which an element needs `bytes` of scratch.
template <typename AnySegment>
std::vector<Run> runs_of(const AnySegment* segments, size_t count, int64_t bytes, const c10::Device& device) {
  std::vector<Run> runs;
  for (size_t s = 0; s < count; ++s) {
    const auto numel = static_cast<int64_t>(segments[s].numel);
    const int64_t most = device.is_cpu() ? kHostRun : bytes > 0 ? kDeviceScratch / bytes : numel;
    for (int64_t begin = 0; begin < numel; begin += most) runs.push_back({s, begin, std::min(most, numel - begin)});
  }
  return runs;
}

// Calls body(number, run, scratch) for each run, on the host from the pool's threads; for none without memory.
template <typename Body>
void each_run(const c10::Device& device, const Launch& launch, const std::vector<Run>& runs, int64_t bytes,
              const Body& body) {
  if (runs.empty()) return;
  const size_t lanes =
      device.is_cpu() && launch.pool != nullptr ? std::min<size_t>(runs.size(), launch.pool->threads()) : 1;
  int64_t longest = 0;
  for (const Run& run : runs) longest = std::max(longest, run.numel);
  const size_t lane_bytes = bytes == 0 ? 0 : static_cast<size_t>(longest * bytes + kMostArrays * kAlign);
  TorchScratch own(device);
  char* memory = nullptr;
  if (lane_bytes > 0) {
    kernels::Scratch& scratch = launch.scratch != nullptr ? *launch.scratch : own;
    memory = static_cast<char*>(scratch.allocate(lanes * lane_bytes));
    if (memory == nullptr) return static_cast<void>(found_failure = own.error());
  }
  const auto work = [&](size_t first, size_t end) {
    const Unobserved unobserved;
    for (size_t lane = first; lane < end; ++lane)
      for (size_t i = lane; i < runs.size(); i += lanes)
        body(i, runs[i], RunScratch{memory + lane * lane_bytes, device});
  };
  if (lanes == 1) return work(0, 1);
  launch.pool->parallel_for(lanes, 1, work);
}

template <bool add>
void copy_or_add(const c10::Device& device, const Launch& launch, void* dst, DType dst_dtype, const void* src,
                 DType src_dtype, size_t n, float scale) {
  const bool wide = dst_dtype == DType::kF64 || src_dtype == DType::kF64;
  const DType middle = wide ? DType::kF64 : DType::kF32;
  const bool direct = scale == 1 && (!add || (dst_dtype == middle && src_dtype == middle));
  const bool scaled = !add && dst_dtype == middle && src_dtype == middle;
  const int64_t bytes = direct || scaled ? 0 : 2 * static_cast<int64_t>(dtype_bytes(middle));
  const Segment segment = {dst, n};
  each_run(device, launch, runs_of(&segment, 1, bytes, device), bytes, [&](size_t, Run run, RunScratch scratch) {
    at::Tensor to = array_from(dst, dst_dtype, run.begin, run.numel, device);
    const at::Tensor from = array_from(src, src_dtype, run.begin, run.numel, device);
    if (direct) return static_cast<void>(add ? to.add_(from) : to.copy_(from));
    if (scaled) return static_cast<void>(at::mul_out(to, from, number(scale)));
    const at::Tensor value = scratch.take(torch_type(middle), run.numel).copy_(from).mul_(scale);
    if (add && dst_dtype == middle) return static_cast<void>(to.add_(value));
    if (add) value.add_(scratch.take(torch_type(middle), run.numel).copy_(to));
    to.copy_(value);
  });
}

void move_all(const c10::Device& device, const Launch& launch, const kernels::Move* moves, size_t count, DType to,
              DType from, float scale, bool add) {
  for (size_t i = 0; i < count; ++i)
    (add ? copy_or_add<true> : copy_or_add<false>)(device, launch, moves[i].to, to, moves[i].from, from, moves[i].numel,
                                                   scale);
}

void scale(const c10::Device& device, const Launch& launch, void* data, DType dtype, size_t n, float factor) {
  copy_or_add<false>(device, launch, data, dtype, data, dtype, n, factor);
}

void sum_squares(const c10::Device& device, const Launch& launch, const Segment* segments, size_t count, DType dtype,
                 double* sum) {
  constexpr int64_t kBytes = 8;
  const std::vector<Run> runs = runs_of(segments, count, kBytes, device);
  // A sum of each run, so that the number of threads does not matter.
  const at::Tensor sums = at::zeros({static_cast<int64_t>(runs.size())}, at::TensorOptions(at::kDouble).device(device));
  each_run(device, launch, runs, kBytes, [&](size_t number, Run run, RunScratch scratch) {
    const at::Tensor x = array_from(segments[run.segment].data, dtype, run.begin, run.numel, device);
    const at::Tensor wide = scratch.take(at::kDouble, run.numel).copy_(x);
    sums.select(0, static_cast<int64_t>(number)).add_(wide.mul_(wide).sum());
  });
  array_at(sum, at::kDouble, 1, device).add_(sums.sum());
}

void find_nonfinite(const c10::Device& device, const Launch&, const kernels::Checked* arrays, size_t count,
                    DType dtype) {
  for (size_t i = 0; i < count; ++i) {
    if (arrays[i].numel == 0) continue;
    const at::Tensor x = array_from(arrays[i].data, dtype, 0, static_cast<int64_t>(arrays[i].numel), device);
    at::Tensor found = array_at(arrays[i].found, at::kInt, 1, device);
    found.bitwise_or_(at::isnan(x).any().to(at::kInt).mul_(kernels::kFoundNan));
    found.bitwise_or_(at::isinf(x).any().to(at::kInt).mul_(kernels::kFoundInf));
  }
}

// A value of the device on the host, behind all work on the current stream.
template <typename Value>
Value on_host(const Value* value, const c10::Device& device) {
  Value found{};
  array_at(&found, at::kByte, sizeof found, at::kCPU).copy_(array_at(value, at::kByte, sizeof found, device));
  return found;
}

void finish_norm(const c10::Device& device, const Launch&, const double* sum, const double* failed, float loss_scale,
                 float max_norm, bool check, StepScale* out) {
  const double squares = on_host(sum, device), failures = failed != nullptr ? on_host(failed, device) : 0;
  StepScale found = {};
  cpu_library().finish_norm({}, &squares, &failures, loss_scale, max_norm, check, &found);
  array_at(out, at::kByte, sizeof found, device).copy_(array_at(&found, at::kByte, sizeof found, at::kCPU));
}

void column_sums(const c10::Device& device, const Launch&, const void* data, DType dtype, size_t n, size_t first,
                 size_t columns, double* sums) {
  if (n == 0) return;
  const auto width = static_cast<int64_t>(columns), begin = static_cast<int64_t>(first),
             numel = static_cast<int64_t>(n);
  const int64_t rows = (begin + numel + width - 1) / width;
  const at::Tensor whole = at::zeros({rows, width}, at::TensorOptions(at::kDouble).device(device));
  whole.view({-1}).narrow(0, begin, numel).copy_(array_from(data, dtype, 0, numel, device)).abs_();
  array_at(sums, at::kDouble, width, device).add_(whole.sum({0}));
}

// The operands of a rule: a run of fp32 values and their scaled gradients, which the rule may overwrite.
struct Work {
  at::Tensor p, g, s[kernels::kMaxStates];
  at::Tensor t;  // of the same size, to write to
  const void* constants;
  RunScratch scratch;

  template <typename Constants>
  const Constants& of() const {
    return *static_cast<const Constants*>(constants);
  }
  // x += factor * other
  void add_times(at::Tensor& x, const at::Tensor& other, float factor) {
    if (factor == 0) return;
    at::mul_out(t, other, number(factor));
    x.add_(t);
  }
  // x += factor * (to - x)
  void move(at::Tensor& x, const at::Tensor& to, float factor) {
    at::sub_out(t, to, x);
    x.add_(t.mul_(factor));
  }
  // v += factor * (g * g - v)
  void move_to_square(at::Tensor& v, float factor) {
    at::mul_out(t, g, g);
    v.add_(t.sub_(v).mul_(factor));
  }
};

void adam(Work& w) {
  const auto& c = w.of<kernels::AdamConstants>();
  w.add_times(w.g, w.p, c.decay_grad);
  w.move(w.s[0], w.g, c.move1);
  w.move_to_square(w.s[1], c.move2);
  at::mul_out(w.g, w.s[0], number(c.step_size));
  at::sqrt_out(w.t, w.s[1]);
  w.g.div_(w.t.mul_(c.inv_sqrt_correct).add_(c.eps));
  w.add_times(w.g, w.p, c.decay_param);
  w.p.sub_(w.g);
}

void adagrad(Work& w) {
  const auto& c = w.of<kernels::AdagradConstants>();
  w.add_times(w.g, w.p, c.weight_decay);
  at::mul_out(w.t, w.g, w.g);
  at::sqrt_out(w.t, w.s[0].add_(w.t));
  w.p.sub_(w.g.mul_(c.lr).div_(w.t.add_(c.eps)));
}

void lion(Work& w) {
  const auto& c = w.of<kernels::LionConstants>();
  at::Tensor away = w.scratch.take(at::kFloat, w.p.numel()), nan = w.scratch.take(at::kBool, w.p.numel());
  at::sub_out(away, w.g, w.s[0]);
  at::mul_out(w.g, away, number(c.move1)).add_(w.s[0]);
  at::ne_out(nan, w.g, w.g);
  w.g.sign_().masked_fill_(nan, NAN).mul_(c.lr);  // torch's sign of a nan is 0
  w.add_times(w.g, w.p, c.decay);
  w.p.sub_(w.g);
  w.s[0].add_(away.mul_(c.move2));
}

void sgd(Work& w) {
  const auto& c = w.of<kernels::SgdConstants>();
  w.add_times(w.g, w.p, c.weight_decay);
  if (c.buffered) {
    at::Tensor change = w.scratch.take(at::kFloat, w.p.numel());
    at::mul_out(change, w.g, number(c.gain));
    at::mul_out(w.t, w.s[0], number(c.leak));
    w.s[0].add_(change.sub_(w.t));
    if (c.look_ahead == 0) w.g.copy_(w.s[0]);
    if (c.look_ahead != 0) w.add_times(w.g, w.s[0], c.look_ahead);
  }
  w.p.sub_(w.g.mul_(c.lr));
}

struct AnyRule {
  const char* name;
  void (*step)(Work&);
};
constexpr AnyRule kRules[] = {{"adam", &adam}, {"adagrad", &adagrad}, {"lion", &lion}, {"sgd", &sgd}};

// All other rules, and random rounding: the CPU's library works on copies on the host.
void update_by_host(const c10::Device& device, const kernels::UpdateKernel& kernel, const UpdateSegment& segment,
                    const UpdateArgs& args, const StepScale& factor) {
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  const auto fetch = [&](const void* data, size_t bytes) -> void* {
    if (data == nullptr || bytes == 0) return nullptr;
    const at::Tensor there = array_at(data, at::kByte, static_cast<int64_t>(bytes), device);
    copies.emplace_back(there, there.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
    return copies.back().second.data_ptr();
  };
  const size_t n = segment.numel;
  const bool packed = std::strcmp(kernel.name, "adam8bit") == 0;  // [Note: 8-bit states] in kernels/code_book.h
  UpdateSegment here = segment;
  here.master = fetch(segment.master, n * dtype_bytes(args.master_dtype));
  here.grad = fetch(segment.grad, n * dtype_bytes(args.grad_dtype));
  here.lp = fetch(segment.lp, n * dtype_bytes(args.lp_dtype));
  here.scratch = static_cast<float*>(fetch(segment.scratch, n * sizeof(float)));
  const bool one_bit = std::strncmp(kernel.name, "onebit_lamb", std::strlen("onebit_lamb")) == 0;
  const size_t sums = one_bit ? kernels::onebit_lamb::kNumbers : kernels::kLambSums;
  here.sums = static_cast<double*>(fetch(segment.sums, sums * sizeof(double)));
  for (int k = 0; k < kernel.states; ++k) {
    const size_t of_packed = k < 2 ? n : kernels::code_blocks(n) * sizeof(float);
    here.states[k] = fetch(segment.states[k], packed ? of_packed : n * dtype_bytes(args.state_dtype));
  }
  cpu_library().update({}, kernel, &here, 1, args, &factor);
  for (const auto& [there, copy] : copies) there.copy_(copy);
}

void update(const c10::Device& device, const Launch& launch, const kernels::UpdateKernel& kernel,
            const UpdateSegment* segments, size_t count, const UpdateArgs& args, const StepScale* scale) {
  const StepScale factor = scale != nullptr ? on_host(scale, device) : StepScale{0, 1, 0};
  if (factor.skip != 0) return;
  const auto wanted = [&](const AnyRule& rule) { return std::strcmp(rule.name, kernel.name) == 0; };
  const AnyRule* rule = std::find_if(std::begin(kRules), std::end(kRules), wanted);
  if (rule == std::end(kRules) || args.stochastic) {
    for (size_t s = 0; s < count; ++s) update_by_host(device, kernel, segments[s], args, factor);
    return;
  }
  const int64_t bytes = 20 + 4 * kernel.states;  // weights, gradients, t, what a rule takes; states
  each_run(device, launch, runs_of(segments, count, bytes, device), bytes, [&](size_t, Run run, RunScratch scratch) {
    const UpdateSegment& segment = segments[run.segment];
    const auto part = [&](const void* data, DType type) {
      return array_from(data, type, run.begin, run.numel, device);
    };
    const auto load = [&](const void* data, DType type) {
      return type == DType::kF32 ? part(data, type) : scratch.take(at::kFloat, run.numel).copy_(part(data, type));
    };
    Work w{
        load(segment.master, args.master_dtype), scratch.take(at::kFloat, run.numel), {}, {}, args.constants, scratch};
    const at::Tensor grad = part(segment.grad, args.grad_dtype);
    if (args.grad_dtype == DType::kF32) at::mul_out(w.g, grad, number(factor.grad_scale));
    if (args.grad_dtype != DType::kF32) w.g.copy_(grad).mul_(factor.grad_scale);
    w.t = scratch.take(at::kFloat, run.numel);
    for (int k = 0; k < kernel.states; ++k) w.s[k] = load(segment.states[k], args.state_dtype);
    w.scratch = scratch;
    rule->step(w);
    if (args.master_dtype != DType::kF32) part(segment.master, args.master_dtype).copy_(w.p);
    for (int k = 0; args.state_dtype != DType::kF32 && k < kernel.states; ++k)
      part(segment.states[k], args.state_dtype).copy_(w.s[k]);
    if (segment.lp != nullptr) part(segment.lp, args.lp_dtype).copy_(w.p);
  });
}

const char* last_error() {
  if (found_failure.empty()) return nullptr;
  told_failure = std::exchange(found_failure, {});
  return told_failure.c_str();
}

template <size_t... kType>
auto make_tables(std::index_sequence<kType...>) {
  const auto table = [](auto type) -> kernels::KernelTable {
    constexpr auto kOne = static_cast<c10::DeviceType>(decltype(type)::value);
    kernels::KernelTable made = cpu_library();
    made.device = "any";
    made.isa = "operations of torch";
    made.copy = &Entry<kOne, &copy_or_add<false>>::call;
    made.accumulate = &Entry<kOne, &copy_or_add<true>>::call;
    made.move_all = &Entry<kOne, &move_all>::call;
    made.find_nonfinite = &Entry<kOne, &find_nonfinite>::call;
    made.sum_squares = &Entry<kOne, &sum_squares>::call;
    made.finish_norm = &Entry<kOne, &finish_norm>::call;
    made.update = &Entry<kOne, &update>::call;
    made.scale = &Entry<kOne, &scale>::call;
    made.last_error = &last_error;
    made.column_sums = &Entry<kOne, &column_sums>::call;
    return made;
  };
  return std::array<kernels::KernelTable, sizeof...(kType)>{{table(std::integral_constant<size_t, kType>())...}};
}

}  // namespace

void note_failure(std::string what) { found_failure = std::move(what); }

}  // namespace any

const kernels::KernelTable& any_kernels(c10::DeviceType type) {
  static const auto all = any::make_tables(std::make_index_sequence<c10::COMPILE_TIME_MAX_DEVICE_TYPES>());
  return all.at(static_cast<size_t>(type));
}

size_t scratch_bytes(const kernels::KernelTable& table, const c10::Device& device, int threads, int64_t numel) {
  if (&table != &any_kernels(device.type())) return 0;
  const int64_t most = device.is_cpu() ? any::kHostRun * threads * any::kMostElementBytes : any::kDeviceScratch;
  const int64_t slack = threads * any::kMostArrays * any::kAlign;
  return static_cast<size_t>(std::min(most, numel * any::kMostElementBytes) + slack);
}

}  // namespace ds::zero
