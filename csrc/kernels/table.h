// What the engine needs from a device, as one table of functions: the engine never asks which device it runs on.
// The tables are plain data in torch-free libraries; `abi` and `size` guard against a library of another build.
//
// Rules for every entry: pointers are in the memory of the table's device; n == 0 and count == 0 are allowed and do
// nothing; pointers need only the alignment of their element type; source and destination may be equal but must not
// overlap otherwise. Work is ordered by Launch::stream on asynchronous devices; on the CPU it is done on return.
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/thread_pool.h"

namespace ds::kernels {

// Where a kernel runs. CPU: on `pool` (null: on the calling thread). CUDA: on `stream`, a cudaStream_t of the
// device that is current on the calling thread.
struct Launch {
  ThreadPool* pool = nullptr;
  void* stream = nullptr;
};

struct Segment {
  void* data;
  size_t numel;
};

// One run of consecutive elements of a parameter and its optimizer state.
struct AdamSegment {
  float* master;      // fp32 weights, updated in place
  float* exp_avg;     // first moment
  float* exp_avg_sq;  // second moment
  const void* grad;   // of AdamArgs::grad_dtype
  void* lp;           // low-precision copy to write, of AdamArgs::lp_dtype; null: none
  size_t numel;
};

struct AdamArgs {
  float lr, beta1, beta2, eps, weight_decay;
  // 1 - beta^step, or 1 where bias correction is off. The update is
  // master -= lr / bias_correction1 * exp_avg / (sqrt(exp_avg_sq) / sqrt(bias_correction2) + eps)
  double bias_correction1, bias_correction2;
  bool adamw;  // true: decoupled decay (Loshchilov & Hutter 2019), master *= 1 - lr * wd; false: grad += wd * master
  DType grad_dtype, lp_dtype;
};

// The result of a gradient norm and what to do with it; lives in device memory, written by `finish_norm`.
struct StepScale {
  double norm;       // 2-norm of the true (unscaled) gradients; inf or nan when they are not finite
  float grad_scale;  // what each stored gradient is multiplied by: unscaling and clipping in one factor
  int32_t skip;      // 1: gradients are not finite, the update must not touch anything
};

struct KernelTable {
  uint32_t abi, size;
  const char* device;  // "cpu" or "cuda"
  const char* isa;     // the instruction set in use, for reports

  // dst = src * scale, converting; rounds to nearest even.
  void (*copy)(const Launch&, void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t n, float scale);
  // dst += src * scale, computed in fp32, rounded once to dst_dtype.
  void (*accumulate)(const Launch&, void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t n, float scale);
  // *sum += sum of squares over all segments, accumulated in fp64 in an order that depends on the segments alone
  // (not on the thread count). A nan or inf anywhere makes it nan or inf.
  void (*sum_squares)(const Launch&, const Segment* segments, size_t count, DType dtype, double* sum);
  // From *sum, of gradients that are `loss_scale` times too large: norm = sqrt(sum) / loss_scale;
  // grad_scale = 1 / loss_scale * min(1, max_norm / (norm + 1e-6)), without the min term when max_norm <= 0;
  // skip = check && !isfinite(norm).
  void (*finish_norm)(const Launch&, const double* sum, float loss_scale, float max_norm, bool check, StepScale* out);
  // One pass: unscale and clip (scale->grad_scale), Adam, master update, cast to lp. Nothing when scale->skip.
  void (*adam)(const Launch&, const AdamSegment* segments, size_t count, const AdamArgs& args, const StepScale* scale);
};

constexpr uint32_t kKernelAbi = 1;

}  // namespace ds::kernels

extern "C" {
// Null when `abi` is not this library's. The CUDA one is in libds_kernels_cuda.so and loads without a GPU.
__attribute__((visibility("default"))) const ds::kernels::KernelTable* ds_cpu_kernels(uint32_t abi);
__attribute__((visibility("default"))) const ds::kernels::KernelTable* ds_cuda_kernels(uint32_t abi);
}
