// 1-bit Adam and 0/1 Adam: the formulas of kernels/onebit.h, operation by operation (and --fmad=false), so that the
// bits are those of the CPU.
#include "kernels/cuda/segment_list.cuh"
#include "kernels/onebit.h"

namespace ds::kernels::cuda {
namespace {

// One element, and what it exchanges.
struct Element {
  float p, g, x;
  float s[kMaxStates];
};

__device__ float root_of(const Element& e, const OneBitConstants& c) {
  return sqrtf(e.s[1]) * c.inv_sqrt_correct + c.eps;
}

__device__ float change_of(const Element& e, const OneBitConstants& c) {
  return c.step_size * e.s[0] / root_of(e, c) + c.decay * e.p;
}

__device__ void local_step(Element& e, const OneBitConstants& c) {
  e.s[0] = e.s[0] + c.move1 * (e.g - e.s[0]);
  const float change = change_of(e, c);
  e.p = e.p - change;
  e.s[2] = e.s[2] - change;
}

// A pass reads kStates states, and kWrites has a bit for each one that it writes, then kWeight and kExchanged.
constexpr int kWeight = 16, kExchanged = 32;

struct Send {
  static constexpr int kStates = 1, kWrites = kExchanged;
  __device__ static void step(Element& e, const OneBitConstants& c) {
    e.x = c.gradients ? e.g : e.s[0] + c.move1 * (e.g - e.s[0]);
  }
};

struct Take {
  static constexpr int kStates = 2, kWrites = kWeight + 1;
  __device__ static void step(Element& e, const OneBitConstants& c) {
    e.s[0] = c.gradients ? e.s[0] + c.move1 * (e.x - e.s[0]) : e.x;
    e.p = e.p - change_of(e, c);
  }
};

struct Local {
  static constexpr int kStates = 3, kWrites = kWeight + 1 + 4;
  __device__ static void step(Element& e, const OneBitConstants& c) { local_step(e, c); }
};

struct LocalSend {
  static constexpr int kStates = 3, kWrites = kExchanged + kWeight + 1 + 4;
  __device__ static void step(Element& e, const OneBitConstants& c) {
    local_step(e, c);
    e.x = e.s[2] * root_of(e, c);
  }
};

struct Sync {
  static constexpr int kStates = 4, kWrites = kWeight + 1 + 4 + 8;
  __device__ static void step(Element& e, const OneBitConstants& c) {
    if (c.lr_sum != 0) e.s[0] = -(e.x / c.lr_sum);
    e.p = e.s[3] + e.x / root_of(e, c);
    e.s[3] = e.p;
    e.s[2] = 0;
  }
};

template <class Rule>
__global__ void __launch_bounds__(kThreads)
    onebit_kernel(const __grid_constant__ SegmentList list, UpdateDtypes t, OneBitConstants c, const StepScale* scale) {
  if (scale != nullptr && scale->skip) return;
  const float grad_scale = scale != nullptr ? scale->grad_scale : 1.0f;
  const int number = list.find(blockIdx.x);
  const SegmentPart& part = list.parts[number];
  const size_t begin = size_t{blockIdx.x - list.begin(number)} * kUpdateChunk;
  const size_t end = part.numel < begin + kUpdateChunk ? part.numel : begin + kUpdateChunk;
  bool packed = aligned(part.master) && aligned(part.grad) && aligned(part.lp) && aligned(part.scratch);
#pragma unroll
  for (int k = 0; k < Rule::kStates; ++k) packed = packed && aligned(part.states[k]);
  for_elements(begin, end, threadIdx.x, kThreads, packed, [&](size_t i, auto width) {
    constexpr int kWidth = decltype(width)::value;
    float p[kWidth], g[kWidth], x[kWidth] = {}, s[Rule::kStates][kWidth];
    load(part.master, t.master, i, p);
    load(part.grad, t.grad, i, g);
    if (part.scratch != nullptr) load(part.scratch, DType::kF32, i, x);
#pragma unroll
    for (int k = 0; k < Rule::kStates; ++k) load(part.states[k], t.state, i, s[k]);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      Element one = {p[e], g[e] * grad_scale, x[e], {}};
#pragma unroll
      for (int k = 0; k < Rule::kStates; ++k) one.s[k] = s[k][e];
      Rule::step(one, c);
      p[e] = one.p;
      x[e] = one.x;
#pragma unroll
      for (int k = 0; k < Rule::kStates; ++k) s[k][e] = one.s[k];
    }
#pragma unroll
    for (int k = 0; k < Rule::kStates; ++k)
      if (Rule::kWrites >> k & 1) store_rounded(part.states[k], t.state, i, s[k], t, part.stream, part.first, 1 + k);
    if (Rule::kWrites & kExchanged) store(part.scratch, DType::kF32, i, x);
    if (!(Rule::kWrites & kWeight)) return;
    store_rounded(part.master, t.master, i, p, t, part.stream, part.first, 0);
    if (part.lp != nullptr) store(part.lp, t.lp, i, p);
  });
}

template <class Rule>
void pass(const Launch& launch, const UpdateSegment* segments, size_t count, const UpdateArgs& args,
          const StepScale* scale) {
  const auto constants = *static_cast<const OneBitConstants*>(args.constants);
  for_segment_lists<kUpdateChunk>(segments, count, args, Rule::kStates, [&](const SegmentList& list, unsigned chunks) {
    launch_kernel(launch, &onebit_kernel<Rule>, chunks, kThreads, 0, list, dtypes_of(args), constants, scale);
  });
}

template <class Rule>
struct PassRegistration : UpdateRegistration {
  explicit PassRegistration(const char* name)
      : UpdateRegistration(name, Rule::kStates, sizeof(OneBitConstants), &pass<Rule>) {}
};

const PassRegistration<Send> send_registration("onebit_send");
const PassRegistration<Take> take_registration("onebit_take");
const PassRegistration<Local> local_registration("zero_one_local");
const PassRegistration<LocalSend> local_send_registration("zero_one_send");
const PassRegistration<Sync> sync_registration("zero_one_sync");

}  // namespace
}  // namespace ds::kernels::cuda
