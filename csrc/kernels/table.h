// The functions that the engine needs of a device, in one table: the engine never asks for the kind of device.
// The tables are plain data in torch-free libraries; `abi` and `size` guard against a library of another build.
//
// Rules for every entry: pointers are in the memory of the table's device (structs and arrays passed by pointer to
// describe segments are in host memory and may be freed on return); n == 0 and count == 0 are allowed and do nothing;
// pointers need only the alignment of their element type; source and destination may be equal (where their element
// sizes are) but must not overlap otherwise. Work is ordered by Launch::stream on asynchronous devices; on the CPU it
// is done on return. Arithmetic is fp32, or fp64 where one side is fp64; 16-bit results round to nearest even. The
// result does not depend on the thread count.
#pragma once
#include "kernels/launch.h"
#include "kernels/norm.h"
#include "kernels/update.h"

namespace ds::kernels {

struct KernelTable {
  uint32_t abi, size;
  const char* device;  // torch's name of the kind of device the library was written for
  const char* isa;     // the instruction set in use, for reports

  // dst = src * scale, converting.
  void (*copy)(const Launch&, void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t n, float scale);
  // dst += src * scale, rounded once to dst_dtype.
  void (*accumulate)(const Launch&, void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t n,
                     float scale);
  // *sum += sum of squares over all segments, accumulated in fp64 in an order that depends on the segments alone, not
  // on the thread count, the instruction set or the device (kernels/sum_order.h). A nan or inf anywhere makes it nan
  // or inf. Scratch on CUDA: kSumScratchBytes for each block of each segment.
  void (*sum_squares)(const Launch&, const Segment* segments, size_t count, DType dtype, double* sum);
  // From *sum, of gradients that are `loss_scale` times too large: norm = sqrt(sum) / loss_scale;
  // grad_scale = 1 / loss_scale * min(1, max_norm / (norm + 1e-6)), without the min term when max_norm <= 0;
  // skip = kSkipFailed where *failed != 0 (null: nobody has), else kSkipNotFinite where check && !isfinite(norm), else
  // 0.
  void (*finish_norm)(const Launch&, const double* sum, const double* failed, float loss_scale, float max_norm,
                      bool check, StepScale* out);
  // The update kernel of that name ("adam"; see kernels/<name>.h), valid for all tables of this device; null: none.
  const UpdateKernel* (*find_update)(const char* name);
  // The names there are, by number from 0; null behind the last.
  const char* (*update_name)(size_t index);
  // One pass: unscale and clip (scale->grad_scale), the rule's update of master and states, cast to lp. Nothing when
  // scale->skip. A null scale is {grad_scale 1, skip 0}.
  void (*update)(const Launch&, const UpdateKernel& kernel, const UpdateSegment* segments, size_t count,
                 const UpdateArgs& args, const StepScale* scale);
  // data *= factor. The exemplar kernel: read kernels/ref/scale.cpp, cpu/scale.cpp and cuda/scale.cu to write another.
  void (*scale)(const Launch&, void* data, DType dtype, size_t n, float factor);

  // Null, or a text with static lifetime about a launch of this thread that failed since the last call, which clears
  // it; where device_error() is not null, that. Work is asynchronous on CUDA: a fault inside a kernel may be reported
  // by a later call. The CPU's kernels cannot fail.
  const char* (*last_error)();
  // Null, or why nothing can run on this device here (no GPU, no driver), with static lifetime. Opens no context.
  const char* (*device_error)();

  // sums[(first + i) % columns] += |data[i]|: n elements of a matrix in rows of `columns`, of which the first lies in
  // column `first` < columns. In fp64, each column from its first row on, so that all devices give the same bits.
  void (*column_sums)(const Launch&, const void* data, DType dtype, size_t n, size_t first, size_t columns,
                      double* sums);

  // to = from * scale, or to += from * scale where `add`, as copy and accumulate do, for each of `count` moves: few
  // launches, however many moves there are.
  void (*move_all)(const Launch&, const Move* moves, size_t count, DType to, DType from, float scale, bool add);
  // *found |= kFoundNan for each of `count` arrays that has a nan, |= kFoundInf for one that has an inf: few launches,
  // however many arrays there are.
  void (*find_nonfinite)(const Launch&, const Checked* arrays, size_t count, DType dtype);
};  // append only: a new entry goes to the end

constexpr uint32_t kKernelAbi = 5;

}  // namespace ds::kernels

extern "C" {
// In libds_kernels_cpu.so. Null where there is no such table; the _error twin (same arguments) then says why in one
// paragraph: another `abi`, a DS_FORCE_ISA that is not valid here, or a CUDA library that is not there.
__attribute__((visibility("default"))) const ds::kernels::KernelTable* ds_cpu_kernels(uint32_t abi);
__attribute__((visibility("default"))) const char* ds_cpu_kernels_error(uint32_t abi);
// The body for one instruction set ("scalar", "neon", "sse4", "avx2", "avx512"), whatever DS_FORCE_ISA says; "ref":
// the plain loops of kernels/ref, on one thread. For tests and benchmarks.
__attribute__((visibility("default"))) const ds::kernels::KernelTable* ds_cpu_kernels_isa(uint32_t abi,
                                                                                          const char* isa);
// The table of a kind of device, by torch's name of it in small letters. That of "cpu" is in this library; that of any
// other is in libds_kernels_<device>.so in the folder of this one, or in the file that DS_<DEVICE>_KERNELS names. Such
// a library is opened once. It must open without a device: the table's device_error() says whether there is one.
__attribute__((visibility("default"))) const ds::kernels::KernelTable* ds_kernels(uint32_t abi, const char* device);
__attribute__((visibility("default"))) const char* ds_kernels_error(uint32_t abi, const char* device);
// Whether there is such a library, or one is named: where it cannot be used, that is an error, and where there is none,
// the caller may have other kernels (zero/any_kernels.h).
__attribute__((visibility("default"))) bool ds_has_kernels(const char* device);

// In the library of a device other than "cpu". Null when `abi` is not this library's.
__attribute__((visibility("default"))) const ds::kernels::KernelTable* ds_device_kernels(uint32_t abi);
}
