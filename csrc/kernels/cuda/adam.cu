// Adam over many tensors: the formulas of kernels/adam.h, operation by operation (and --fmad=false), so that the bits
// are those of the CPU.
#include "kernels/adam_math.h"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/entries.cuh"

namespace ds::kernels::cuda {
namespace {

constexpr size_t kChunk = size_t{kThreads} * kPack * 4;  // elements per thread block

// Some of the segments, passed by value within the 4 KB of kernel arguments.
struct AdamList {
  static constexpr int kMax = 64;
  AdamSegment segments[kMax];
  unsigned end[kMax];  // number of chunks up to and including this segment
  int count;
};

struct Dtypes {
  DType master, state, grad, lp;
};

template <int N>
__device__ void adam_step(const AdamSegment& seg, const Dtypes& t, const AdamConstants& c, size_t i) {
  float p[N], m[N], v[N], g[N];
  load(seg.master, t.master, i, p);
  load(seg.exp_avg, t.state, i, m);
  load(seg.exp_avg_sq, t.state, i, v);
  load(seg.grad, t.grad, i, g);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    g[k] = g[k] * c.grad_scale;
    g[k] = g[k] + c.decay_grad * p[k];
    m[k] = m[k] + c.move1 * (g[k] - m[k]);
    v[k] = v[k] + c.move2 * (g[k] * g[k] - v[k]);
    float d = c.step_size * m[k] / (sqrtf(v[k]) * c.inv_sqrt_correct + c.eps);
    d = d + c.decay_param * p[k];
    p[k] = p[k] - d;
  }
  store(seg.master, t.master, i, p);
  store(seg.exp_avg, t.state, i, m);
  store(seg.exp_avg_sq, t.state, i, v);
  if (seg.lp != nullptr) store(seg.lp, t.lp, i, p);
}

__global__ void __launch_bounds__(kThreads)
    adam_kernel(const __grid_constant__ AdamList list, Dtypes dtypes, AdamConstants constants, const StepScale* scale) {
  if (scale != nullptr) {
    if (scale->skip) return;
    constants.grad_scale = scale->grad_scale;
  }
  int s = 0;
  for (int high = list.count - 1; s < high;) {  // the first segment that ends behind this chunk
    const int middle = (s + high) / 2;
    if (blockIdx.x < list.end[middle]) {
      high = middle;
    } else {
      s = middle + 1;
    }
  }
  const AdamSegment& seg = list.segments[s];
  const size_t begin = (blockIdx.x - (s == 0 ? 0 : list.end[s - 1])) * kChunk;
  const size_t end = seg.numel < begin + kChunk ? seg.numel : begin + kChunk;
  const bool packed =
      aligned(seg.master) && aligned(seg.exp_avg) && aligned(seg.exp_avg_sq) && aligned(seg.grad) && aligned(seg.lp);
  for_elements(begin, end, threadIdx.x, kThreads, packed,
               [&](size_t i, auto width) { adam_step<width.value>(seg, dtypes, constants, i); });
}

}  // namespace

void adam(const Launch& launch, const AdamSegment* segments, size_t count, const AdamArgs& args,
          const StepScale* scale) {
  const AdamConstants constants = adam_constants(args, 1.0f);
  const Dtypes dtypes = {args.master_dtype, args.state_dtype, args.grad_dtype, args.lp_dtype};
  // A launch holds at most kMax segments and 2^31 - 1 chunks; a segment that does not fit is continued in the next.
  constexpr size_t kMaxChunks = 0x7fffffff;
  size_t offset = 0;  // elements of segments[s] that are done
  for (size_t s = 0; s < count;) {
    AdamList list;
    list.count = 0;
    size_t chunks = 0;
    while (s < count && list.count < AdamList::kMax && chunks < kMaxChunks) {
      const AdamSegment& whole = segments[s];
      const size_t left = whole.numel - offset;
      if (left == 0) {
        ++s;
        offset = 0;
        continue;
      }
      const size_t wanted = (left + kChunk - 1) / kChunk, room = kMaxChunks - chunks;
      const size_t taken = wanted < room ? wanted : room;
      const auto at = [&](const void* data, DType dtype) {
        return data == nullptr ? nullptr
                               : const_cast<char*>(static_cast<const char*>(data)) + offset * dtype_bytes(dtype);
      };
      const size_t numel = wanted <= room ? left : taken * kChunk;
      list.segments[list.count] = {at(whole.master, args.master_dtype),
                                   at(whole.exp_avg, args.state_dtype),
                                   at(whole.exp_avg_sq, args.state_dtype),
                                   at(whole.grad, args.grad_dtype),
                                   at(whole.lp, args.lp_dtype),
                                   numel};
      chunks += taken;
      list.end[list.count++] = static_cast<unsigned>(chunks);
      offset += numel;
    }
    if (list.count == 0) break;
    adam_kernel<<<static_cast<unsigned>(chunks), kThreads, 0, stream_of(launch)>>>(list, dtypes, constants, scale);
  }
}

}  // namespace ds::kernels::cuda
