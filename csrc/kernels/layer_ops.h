// Operations between the matrix products of a transformer layer, in a table of their own beside kernels/table.h, whose
// rules hold here, too: norms, activations, dropout with a bias and a residual, rotary embeddings.
//
// Tensors are rows of one dtype, end to end; statistics and gradients of weights are fp32, fp64 for fp64 rows ("wide").
// Arithmetic is wide. Outputs may be inputs of the same shape. Results do not depend on the number of threads.
#pragma once
#include "kernels/launch.h"
#include "kernels/philox.h"

namespace ds::kernels {

// Rows of `size` elements. centered: LayerNorm, (x - mean) / sqrt(variance + eps); else RMSNorm, x / sqrt(mean of x^2 +
// eps). Ba et al. 2016, "Layer Normalization"; Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
struct NormRows {
  DType dtype;
  size_t rows, size;
  bool centered;
  float eps;
};

struct NormInputs {
  const void* x;
  const void* bias;            // of `size` elements, added to each row of x; null: none
  const void* residual;        // as x, added to it; null: none
  const void *weight, *shift;  // of `size` elements; null: 1, 0
};
struct NormOutputs {
  void* y;
  void* sum;           // x + bias + residual, which backward reads; null: not wanted
  void *mean, *scale;  // wide, a number for each row: the mean (null for RMSNorm) and 1 / sqrt(...); null: not wanted
};
struct NormGradients {
  const void* dy;
  const void* x;  // what was normalized; or null, and `y` is given: then x is computed back from it
  const void* y;  // no weight is 0
  const void *weight, *shift, *mean, *scale;
  const void* more;  // as x, added to dx: the gradient of a residual; null: none
  void* dx;
  void *dweight, *dshift;  // wide, `size` numbers each; null: neither is wanted
  void* parts;             // kNormParts * 2 * size wide numbers of memory to work in; null with dweight
};
// Rows are cut into this many parts, whose sums are added up in their order.
constexpr size_t kNormParts = 32;

enum class Activation : int32_t { kGeluTanh, kGelu, kRelu, kSilu };

// Rows of `size` outputs. gated: a row of x is a gate and then a value, each of `size` elements, and an output is
// activation(gate) * value.
struct ActivationRows {
  DType dtype;
  size_t rows, size;
  Activation kind;
  bool gated;
};

// Dropout of the elements of rows: element i of row r is dropped where philox({i / 4, r, 0, stream}, seed).word[i % 4]
// is less than `below`, the others are multiplied by `kept`.
struct RowDropout {
  uint64_t seed;
  uint32_t below;
  float kept;  // the factor of elements that stay; 0 switches dropout off
  uint32_t stream;
};
DS_HOST_DEVICE static inline float row_factor(const RowDropout& d, uint32_t row, uint32_t element) {
  if (d.kept == 0) return 1;
  return philox({{element / 4, row, 0, d.stream}}, d.seed).word[element % 4] < d.below ? 0 : d.kept;
}

// Heads of `size` features of which the first `rotated` ones turn in pairs by the angle position * base^(-2 p /
// rotated) of pair p: neighbours (`interleaved`), or feature p and p + rotated / 2. Su et al. 2021, "RoFormer".
struct RotaryHeads {
  DType dtype;
  size_t tokens, heads, size, rotated;
  int64_t token, head;       // distances in elements; features are neighbours
  const int64_t* positions;  // of each token
  double base;
  bool interleaved, back;  // back: by the opposite angle, which is the gradient
};

struct LayerKernels {
  uint32_t abi, size;

  void (*norm)(const Launch&, const NormRows&, const NormInputs&, const NormOutputs&);
  void (*norm_backward)(const Launch&, const NormRows&, const NormGradients&);
  // y = activation(x + bias); bias: as a row of x, or null.
  void (*activation)(const Launch&, const ActivationRows&, const void* x, const void* bias, void* y);
  void (*activation_backward)(const Launch&, const ActivationRows&, const void* dy, const void* x, const void* bias,
                              void* dx);
  // y = dropout(x + bias) + residual; bias: of `size` elements, or null; residual: as x, or null.
  void (*dropout)(const Launch&, const RowDropout&, DType dtype, size_t rows, size_t size, const void* x,
                  const void* bias, const void* residual, void* y);
  // out may be x.
  void (*rotary)(const Launch&, const RotaryHeads&, const void* x, void* out);
};  // append only

constexpr uint32_t kLayerAbi = 1;

}  // namespace ds::kernels

extern "C" {
// As ds_kernels() and its family in kernels/table.h.
__attribute__((visibility("default"))) const ds::kernels::LayerKernels* ds_layer_kernels(uint32_t abi,
                                                                                         const char* device);
__attribute__((visibility("default"))) const ds::kernels::LayerKernels* ds_cpu_layer_kernels_isa(uint32_t abi,
                                                                                                 const char* isa);
__attribute__((visibility("default"))) const ds::kernels::LayerKernels* ds_device_layer_kernels(uint32_t abi);
}
