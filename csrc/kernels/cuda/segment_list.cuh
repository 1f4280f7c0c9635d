// For update passes that are more than a loop over elements: segments passed by value within the 4 KB of kernel
// arguments, and the loop on the host that cuts a call into such launches.
#pragma once
#include "kernels/cuda/update.cuh"

namespace ds::kernels::cuda {

// A segment, or what is left of one.
struct SegmentPart {
  void* master;
  void* states[kMaxStates];
  const void* grad;
  void* lp;
  float* scratch;
  double* sums;
  uint64_t stream;
  size_t numel;
  uint32_t first;  // number of the first element in its segment
  unsigned end;    // number of chunks up to and including this part
};

struct SegmentList {
  static constexpr int kMax = 3600 / sizeof(SegmentPart);
  SegmentPart parts[kMax];
  int count;

  __device__ unsigned begin(int part) const { return part == 0 ? 0 : parts[part - 1].end; }
  // The part that a chunk belongs to.
  __device__ int find(unsigned chunk) const {
    int s = 0;
    for (int high = count - 1; s < high;) {  // the first part that ends behind this chunk
      const int middle = (s + high) / 2;
      if (chunk < parts[middle].end) {
        high = middle;
      } else {
        s = middle + 1;
      }
    }
    return s;
  }
};

inline UpdateDtypes dtypes_of(const UpdateArgs& args) {
  return {args.master_dtype, args.state_dtype, args.grad_dtype, args.lp_dtype, args.stochastic, args.seed};
}

inline void* advance(const void* data, DType dtype, size_t numel) {
  return data == nullptr ? nullptr : const_cast<char*>(static_cast<const char*>(data)) + numel * dtype_bytes(dtype);
}

// Calls run(list, chunks) until all segments are done, in chunks of kChunk elements. A list holds at most kMax parts
// and 2^31 - 1 chunks; a segment that does not fit is continued in the next.
template <size_t kChunk, typename Run>
void for_segment_lists(const UpdateSegment* segments, size_t count, const UpdateArgs& args, int states,
                       const Run& run) {
  constexpr size_t kMaxChunks = 0x7fffffff;
  size_t offset = 0;  // elements of segments[s] that are done
  for (size_t s = 0; s < count;) {
    SegmentList list;
    list.count = 0;
    size_t chunks = 0;
    while (s < count && list.count < SegmentList::kMax && chunks < kMaxChunks) {
      const UpdateSegment& whole = segments[s];
      const size_t left = whole.numel - offset;
      if (left == 0) {
        ++s;
        offset = 0;
        continue;
      }
      const size_t wanted = (left + kChunk - 1) / kChunk, room = kMaxChunks - chunks;
      const size_t taken = wanted < room ? wanted : room;
      SegmentPart& part = list.parts[list.count++];
      part.master = advance(whole.master, args.master_dtype, offset);
      for (int k = 0; k < kMaxStates; ++k)
        part.states[k] = k < states ? advance(whole.states[k], args.state_dtype, offset) : nullptr;
      part.grad = advance(whole.grad, args.grad_dtype, offset);
      part.lp = advance(whole.lp, args.lp_dtype, offset);
      part.scratch = whole.scratch == nullptr ? nullptr : whole.scratch + offset;
      part.sums = whole.sums;
      part.stream = whole.stream;
      part.numel = wanted <= room ? left : taken * kChunk;
      part.first = static_cast<uint32_t>(offset);
      part.end = static_cast<unsigned>(chunks += taken);
      offset += part.numel;
    }
    if (list.count == 0) break;
    run(list, static_cast<unsigned>(chunks));
  }
}

}  // namespace ds::kernels::cuda
