// Kernels of a mixture of experts, in a table of their own beside kernels/table.h, whose rules hold here, too: who
// chooses which expert, rows moved there and back, one matrix product of many groups.
//
// Rows are `width` elements of one dtype, end to end. Indices are int32 in the memory of the table's device. Sums are
// fp32, in fp64 for fp64 rows. Every output is written whole.
#pragma once
#include "kernels/launch.h"

namespace ds::kernels {

// One product c = a b (+ bias on each row). a is m x k, or k x m where `a_turned`; b is k x n, or n x k where
// `b_turned`; c is m x n: each row-major without gaps, of one dtype. m, n or k may be 0; k = 0 leaves the bias, or
// zeros.
struct GemmGroup {
  const void *a, *b, *bias;  // bias: n elements, or null
  void* c;
  int64_t m, n, k;
};
struct GemmForm {
  bool a_turned = false, b_turned = false;
};

struct RouteKernels {
  uint32_t abi, size;

  // For each of `tokens` rows of logits, over `experts`: probs = softmax(logits), and index[t * k + j] = the j-th
  // largest of `select`, or of the logits where that is null; of equal ones the first comes first. A row with a nan in
  // its logits gets index -2 throughout. 1 <= k <= experts.
  void (*topk_gate)(const Launch&, const float* logits, const float* select, size_t tokens, size_t experts, size_t k,
                    float* probs, int32_t* index);
  // out[r] = src[index[r] / divisor] * (weight ? weight[index[r]] : 1) for r < rows; zeros where index[r] is negative.
  void (*permute_rows)(const Launch&, void* out, const void* src, DType dtype, size_t width, size_t rows,
                       const int32_t* index, const float* weight, int64_t divisor);
  // out[t] = sum over j < k of src[slot[t * k + j]] * (weight ? weight[t * k + j] : 1), j by j, without negative slots.
  void (*combine_rows)(const Launch&, void* out, const void* src, DType dtype, size_t width, size_t tokens, size_t k,
                       const int32_t* slot, const float* weight);
  // out[a] = sum of src[slot[a]] * grad[a / k] over the width; 0 where slot[a] is negative. a < tokens * k.
  void (*dot_rows)(const Launch&, float* out, const void* src, const void* grad, DType dtype, size_t width,
                   size_t tokens, size_t k, const int32_t* slot);
  // All groups at once, however different. The last bits depend on the instruction set, not on the threads.
  void (*grouped_gemm)(const Launch&, const GemmGroup* groups, size_t count, GemmForm form, DType dtype);
};  // append only

constexpr uint32_t kRouteAbi = 1;

}  // namespace ds::kernels

extern "C" {
// As ds_kernels() and its family in kernels/table.h.
__attribute__((visibility("default"))) const ds::kernels::RouteKernels* ds_route_kernels(uint32_t abi,
                                                                                         const char* device);
__attribute__((visibility("default"))) const ds::kernels::RouteKernels* ds_cpu_route_kernels_isa(uint32_t abi,
                                                                                                 const char* isa);
__attribute__((visibility("default"))) const ds::kernels::RouteKernels* ds_device_route_kernels(uint32_t abi);
}
