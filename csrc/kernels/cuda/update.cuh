// Update kernels on CUDA: a rule gives the update of one element, the rest is shared. cuda/adam.cu shows how a rule
// joins. No launch waits for the device, and nothing depends on host memory after it, so steps can be captured.
#pragma once
#include <type_traits>
#include <vector>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/entries.cuh"
#include "kernels/random_rounding.h"
#include "kernels/update.h"

namespace ds::kernels::cuda {

using UpdatePass = void (*)(const Launch&, const UpdateSegment*, size_t count, const UpdateArgs&, const StepScale*);

struct CudaUpdate : UpdateKernel {
  UpdatePass pass;
};

// Filled while the library is loaded, constant afterwards.
std::vector<CudaUpdate>& updates();

struct UpdateRegistration {
  UpdateRegistration(const char* name, int states, size_t constants_bytes, UpdatePass pass) {
    updates().push_back({{name, states, constants_bytes}, pass});
  }
};

const UpdateKernel* find_update(const char* name);
const char* update_name(size_t index);
void update(const Launch&, const UpdateKernel& kernel, const UpdateSegment* segments, size_t count,
            const UpdateArgs& args, const StepScale* scale);

constexpr size_t kUpdateChunk = size_t{kThreads} * kPack * 4;  // elements per thread block

// Segments, passed by value within the 4 KB of kernel arguments.
template <int kStates>
struct UpdateList {
  struct Part {
    void* master;
    void* states[kStates];
    const void* grad;
    void* lp;
    size_t numel;
    uint64_t stream;
    uint32_t first;  // number of the first element in its segment
    unsigned end;    // number of chunks up to and including this part
  };
  static constexpr int kMax = 3600 / sizeof(Part);
  Part parts[kMax];
  int count;
};

struct UpdateDtypes {
  DType master, state, grad, lp;
  bool stochastic;
  uint64_t seed;
};

__device__ inline bool rounds_at_random(const UpdateDtypes& t, DType dtype) {
  return t.stochastic && dtype == DType::kBF16;
}

// x[0..N) to elements [i, i + N) of array number `array`.
template <int N>
__device__ void store_rounded(void* data, DType dtype, size_t i, const float (&x)[N], const UpdateDtypes& t,
                              uint64_t stream, uint32_t first, uint32_t array) {
  if (!rounds_at_random(t, dtype)) return store(data, dtype, i, x);
  const RandomKey key = random_key(t.seed, stream, array);
#pragma unroll
  for (int k = 0; k < N; ++k)
    static_cast<uint16_t*>(data)[i + k] = random_bf16(__float_as_uint(x[k]), key, first + static_cast<uint32_t>(i) + k);
}

template <class Rule, int N>
__device__ void update_elements(const typename UpdateList<Rule::kStates>::Part& part, const UpdateDtypes& t,
                                const typename Rule::Constants& c, float grad_scale, size_t i) {
  float p[N], g[N], s[Rule::kStates][N];
  load(part.master, t.master, i, p);
#pragma unroll
  for (int k = 0; k < Rule::kStates; ++k) load(part.states[k], t.state, i, s[k]);
  load(part.grad, t.grad, i, g);
#pragma unroll
  for (int e = 0; e < N; ++e) {
    float state[Rule::kStates];
#pragma unroll
    for (int k = 0; k < Rule::kStates; ++k) state[k] = s[k][e];
    Rule::step(p[e], state, g[e] * grad_scale, c);
#pragma unroll
    for (int k = 0; k < Rule::kStates; ++k) s[k][e] = state[k];
  }
  store_rounded(part.master, t.master, i, p, t, part.stream, part.first, 0);
#pragma unroll
  for (int k = 0; k < Rule::kStates; ++k)
    store_rounded(part.states[k], t.state, i, s[k], t, part.stream, part.first, 1 + k);
  if (part.lp != nullptr) store(part.lp, t.lp, i, p);
}

template <class Rule>
__global__ void __launch_bounds__(kThreads)
    update_kernel(const __grid_constant__ UpdateList<Rule::kStates> list, UpdateDtypes dtypes,
                  typename Rule::Constants constants, const StepScale* scale) {
  float grad_scale = 1.0f;
  if (scale != nullptr) {
    if (scale->skip) return;
    grad_scale = scale->grad_scale;
  }
  int s = 0;
  for (int high = list.count - 1; s < high;) {  // the first part that ends behind this chunk
    const int middle = (s + high) / 2;
    if (blockIdx.x < list.parts[middle].end) {
      high = middle;
    } else {
      s = middle + 1;
    }
  }
  const auto& part = list.parts[s];
  const size_t begin = (blockIdx.x - (s == 0 ? 0 : list.parts[s - 1].end)) * kUpdateChunk;
  const size_t end = part.numel < begin + kUpdateChunk ? part.numel : begin + kUpdateChunk;
  bool packed = aligned(part.master) && aligned(part.grad) && aligned(part.lp);
#pragma unroll
  for (int k = 0; k < Rule::kStates; ++k) packed = packed && aligned(part.states[k]);
  for_elements(begin, end, threadIdx.x, kThreads, packed, [&](size_t i, auto width) {
    update_elements<Rule, width.value>(part, dtypes, constants, grad_scale, i);
  });
}

// Rule: kStates, Constants, and a __device__ step(p, s, g, constants) of one element.
template <class Rule>
void launch_update(const Launch& launch, const UpdateSegment* segments, size_t count, const UpdateArgs& args,
                   const StepScale* scale) {
  using List = UpdateList<Rule::kStates>;
  const auto constants = *static_cast<const typename Rule::Constants*>(args.constants);
  const UpdateDtypes dtypes = {args.master_dtype, args.state_dtype, args.grad_dtype,
                               args.lp_dtype,     args.stochastic,  args.seed};
  // A launch holds at most kMax parts and 2^31 - 1 chunks; a segment that does not fit is continued in the next.
  constexpr size_t kMaxChunks = 0x7fffffff;
  size_t offset = 0;  // elements of segments[s] that are done
  for (size_t s = 0; s < count;) {
    List list;
    list.count = 0;
    size_t chunks = 0;
    while (s < count && list.count < List::kMax && chunks < kMaxChunks) {
      const UpdateSegment& whole = segments[s];
      const size_t left = whole.numel - offset;
      if (left == 0) {
        ++s;
        offset = 0;
        continue;
      }
      const size_t wanted = (left + kUpdateChunk - 1) / kUpdateChunk, room = kMaxChunks - chunks;
      const size_t taken = wanted < room ? wanted : room;
      const auto at = [&](const void* data, DType dtype) {
        return data == nullptr ? nullptr
                               : const_cast<char*>(static_cast<const char*>(data)) + offset * dtype_bytes(dtype);
      };
      const size_t numel = wanted <= room ? left : taken * kUpdateChunk;
      auto& part = list.parts[list.count++];
      part.master = at(whole.master, args.master_dtype);
      for (int k = 0; k < Rule::kStates; ++k) part.states[k] = at(whole.states[k], args.state_dtype);
      part.grad = at(whole.grad, args.grad_dtype);
      part.lp = at(whole.lp, args.lp_dtype);
      part.numel = numel;
      part.stream = whole.stream;
      part.first = static_cast<uint32_t>(offset);
      chunks += taken;
      part.end = static_cast<unsigned>(chunks);
      offset += numel;
    }
    if (list.count == 0) break;
    launch_kernel(launch, &update_kernel<Rule>, static_cast<unsigned>(chunks), kThreads, 0, list, dtypes, constants,
                  scale);
  }
}

}  // namespace ds::kernels::cuda

// At namespace scope: registers the element-wise rule `name`, a struct of one element's update.
#define DS_CUDA_UPDATE(name, Rule)                                                                                    \
  static const ::ds::kernels::cuda::UpdateRegistration ds_update_##Rule(name, Rule::kStates, sizeof(Rule::Constants), \
                                                                        &::ds::kernels::cuda::launch_update<Rule>)
