// kernels/layer_ops.h on a GPU: plain, a block of threads for each row of a norm, a thread for each element elsewhere.
#include "kernels/layer_ops.h"

#include "kernels/activation_math.h"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/entries.cuh"

namespace ds::kernels::cuda {
namespace {

template <typename Acc>
__device__ Acc element_or(const void* data, DType dtype, size_t i, Acc other) {
  return data != nullptr ? element<Acc>(data, dtype, i) : other;
}
template <typename Acc>
__device__ void put_element(void* data, DType dtype, size_t i, Acc value) {
  const Acc x[1] = {value};
  store(data, dtype, i, x);
}

// The sum of what each thread of the block has, in one order.
template <typename Acc>
__device__ Acc sum_of_block(Acc mine, Acc* shared) {
  shared[threadIdx.x] = mine;
  __syncthreads();
  for (unsigned width = kThreads / 2; width > 0; width /= 2) {
    if (threadIdx.x < width) shared[threadIdx.x] += shared[threadIdx.x + width];
    __syncthreads();
  }
  const Acc sum = shared[0];
  __syncthreads();
  return sum;
}

template <typename Acc>
__device__ Acc norm_input(const NormRows& n, const NormInputs& in, const NormOutputs& out, size_t at, size_t i) {
  if (out.sum != nullptr) return element<Acc>(out.sum, n.dtype, at);  // what backward reads
  return element<Acc>(in.x, n.dtype, at) + element_or<Acc>(in.bias, n.dtype, i, 0) +
         element_or<Acc>(in.residual, n.dtype, at, 0);
}

template <typename Acc>
__global__ void norm_kernel(NormRows n, NormInputs in, NormOutputs out) {
  DS_SHARED(Acc, shared, [kThreads]);
  const size_t row = blockIdx.x * n.size;
  if (out.sum != nullptr)
    for (size_t i = threadIdx.x; i < n.size; i += kThreads)
      put_element<Acc>(out.sum, n.dtype, row + i,
                       element<Acc>(in.x, n.dtype, row + i) + element_or<Acc>(in.bias, n.dtype, i, 0) +
                           element_or<Acc>(in.residual, n.dtype, row + i, 0));
  Acc sum = 0;
  for (size_t i = threadIdx.x; i < n.size; i += kThreads) sum += norm_input<Acc>(n, in, out, row + i, i);
  const Acc mean = n.centered ? sum_of_block(sum, shared) / static_cast<Acc>(n.size) : Acc(0);
  Acc square = 0;
  for (size_t i = threadIdx.x; i < n.size; i += kThreads) {
    const Acc x = norm_input<Acc>(n, in, out, row + i, i) - mean;
    square += x * x;
  }
  const Acc scale = 1 / sqrt(sum_of_block(square, shared) / static_cast<Acc>(n.size) + static_cast<Acc>(n.eps));
  for (size_t i = threadIdx.x; i < n.size; i += kThreads)
    put_element<Acc>(
        out.y, n.dtype, row + i,
        (norm_input<Acc>(n, in, out, row + i, i) - mean) * scale * element_or<Acc>(in.weight, n.dtype, i, 1) +
            element_or<Acc>(in.shift, n.dtype, i, 0));
  if (threadIdx.x != 0) return;
  if (out.mean != nullptr) static_cast<Acc*>(out.mean)[blockIdx.x] = mean;
  if (out.scale != nullptr) static_cast<Acc*>(out.scale)[blockIdx.x] = scale;
}

// The normalized value of an element.
template <typename Acc>
__device__ Acc unit_of(const NormRows& n, const NormGradients& g, size_t row, size_t i) {
  const size_t at = row * n.size + i;
  if (g.x == nullptr)
    return (element<Acc>(g.y, n.dtype, at) - element_or<Acc>(g.shift, n.dtype, i, 0)) /
           element_or<Acc>(g.weight, n.dtype, i, 1);
  const Acc mean = g.mean != nullptr ? static_cast<const Acc*>(g.mean)[row] : Acc(0);
  return (element<Acc>(g.x, n.dtype, at) - mean) * static_cast<const Acc*>(g.scale)[row];
}

template <typename Acc>
__global__ void norm_input_kernel(NormRows n, NormGradients g) {
  DS_SHARED(Acc, shared, [kThreads]);
  const size_t row = blockIdx.x;
  Acc sum = 0, product = 0;
  for (size_t i = threadIdx.x; i < n.size; i += kThreads) {
    const Acc above = element<Acc>(g.dy, n.dtype, row * n.size + i) * element_or<Acc>(g.weight, n.dtype, i, 1);
    sum += above;
    product += above * unit_of<Acc>(n, g, row, i);
  }
  const Acc mean = n.centered ? sum_of_block(sum, shared) / static_cast<Acc>(n.size) : Acc(0);
  const Acc along = sum_of_block(product, shared) / static_cast<Acc>(n.size);
  const Acc scale = static_cast<const Acc*>(g.scale)[row];
  for (size_t i = threadIdx.x; i < n.size; i += kThreads) {
    const size_t at = row * n.size + i;
    const Acc above = element<Acc>(g.dy, n.dtype, at) * element_or<Acc>(g.weight, n.dtype, i, 1);
    put_element<Acc>(
        g.dx, n.dtype, at,
        scale * (above - mean - unit_of<Acc>(n, g, row, i) * along) + element_or<Acc>(g.more, n.dtype, at, 0));
  }
}

// dx may be dy, so this runs first.
template <typename Acc>
__global__ void norm_weight_kernel(NormRows n, NormGradients g, Acc* sums) {
  const size_t number = blockIdx.x * size_t{blockDim.x} + threadIdx.x, part = number / n.size, i = number % n.size;
  if (part >= kNormParts) return;
  const size_t each = (n.rows + kNormParts - 1) / kNormParts,
               end = (part + 1) * each < n.rows ? (part + 1) * each : n.rows;
  Acc weight = 0, shift = 0;
  for (size_t row = part * each; row < end; ++row) {
    const Acc dy = element<Acc>(g.dy, n.dtype, row * n.size + i);
    weight += dy * unit_of<Acc>(n, g, row, i);
    shift += dy;
  }
  sums[part * 2 * n.size + i] = weight;
  sums[part * 2 * n.size + n.size + i] = shift;
}
template <typename Acc>
__global__ void norm_parts_kernel(NormRows n, NormGradients g, const Acc* sums) {
  const size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x;
  if (i >= 2 * n.size) return;
  Acc sum = 0;
  for (size_t part = 0; part < kNormParts; ++part) sum += sums[part * 2 * n.size + i];
  if (i < n.size) {
    static_cast<Acc*>(g.dweight)[i] = sum;
  } else {
    static_cast<Acc*>(g.dshift)[i - n.size] = sum;
  }
}

template <typename Acc>
void norm_as(const Launch& launch, const NormRows& n, const NormInputs& in, const NormOutputs& out) {
  if (n.rows > 0) launch_kernel(launch, &norm_kernel<Acc>, static_cast<unsigned>(n.rows), kThreads, 0, n, in, out);
}
template <typename Acc>
void norm_backward_as(const Launch& launch, const NormRows& n, const NormGradients& g) {
  if (g.dweight != nullptr && n.size > 0) {
    auto* sums = static_cast<Acc*>(g.parts);
    const auto blocks = [](size_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); };
    launch_kernel(launch, &norm_weight_kernel<Acc>, blocks(kNormParts * n.size), kThreads, 0, n, g, sums);
    launch_kernel(launch, &norm_parts_kernel<Acc>, blocks(2 * n.size), kThreads, 0, n, g, sums);
  }
  if (n.rows > 0) launch_kernel(launch, &norm_input_kernel<Acc>, static_cast<unsigned>(n.rows), kThreads, 0, n, g);
}

void norm(const Launch& launch, const NormRows& n, const NormInputs& in, const NormOutputs& out) {
  const auto call = n.dtype == DType::kF64 ? &norm_as<double> : &norm_as<float>;
  call(launch, n, in, out);
}
void norm_backward(const Launch& launch, const NormRows& n, const NormGradients& g) {
  const auto call = n.dtype == DType::kF64 ? &norm_backward_as<double> : &norm_backward_as<float>;
  call(launch, n, g);
}

// dy null: forward.
template <typename Acc>
__global__ void activation_kernel(ActivationRows a, const void* dy, const void* x, const void* bias, void* out) {
  const size_t across = a.gated ? 2 * a.size : a.size, all = a.rows * a.size;
  for (size_t n = blockIdx.x * size_t{blockDim.x} + threadIdx.x; n < all; n += gridDim.x * size_t{blockDim.x}) {
    const size_t i = n % a.size, at = n / a.size * across + i;
    const Acc gate = element<Acc>(x, a.dtype, at) + element_or<Acc>(bias, a.dtype, i, 0);
    const Acc value =
        a.gated ? element<Acc>(x, a.dtype, at + a.size) + element_or<Acc>(bias, a.dtype, a.size + i, 0) : Acc(1);
    if (dy == nullptr) {
      put_element<Acc>(out, a.dtype, n, activated(a.kind, gate) * value);
      continue;
    }
    const Acc upper = element<Acc>(dy, a.dtype, n);
    put_element<Acc>(out, a.dtype, at, upper * value * activation_slope(a.kind, gate));
    if (a.gated) put_element<Acc>(out, a.dtype, at + a.size, upper * activated(a.kind, gate));
  }
}

void activation_backward(const Launch& launch, const ActivationRows& a, const void* dy, const void* x, const void* bias,
                         void* dx) {
  const size_t all = a.rows * a.size;
  if (all == 0) return;
  const auto kernel = a.dtype == DType::kF64 ? &activation_kernel<double> : &activation_kernel<float>;
  launch_kernel(launch, kernel, blocks_for(all, 1), kThreads, 0, a, dy, x, bias, dx);
}
void activation(const Launch& launch, const ActivationRows& a, const void* x, const void* bias, void* y) {
  activation_backward(launch, a, nullptr, x, bias, y);
}

template <typename Acc>
__global__ void dropout_kernel(RowDropout d, DType dtype, size_t rows, size_t size, const void* x, const void* bias,
                               const void* residual, void* y) {
  for (size_t n = blockIdx.x * size_t{blockDim.x} + threadIdx.x; n < rows * size; n += gridDim.x * size_t{blockDim.x}) {
    const size_t i = n % size;
    const Acc kept = static_cast<Acc>(row_factor(d, static_cast<uint32_t>(n / size), static_cast<uint32_t>(i)));
    put_element<Acc>(y, dtype, n,
                     (element<Acc>(x, dtype, n) + element_or<Acc>(bias, dtype, i, 0)) * kept +
                         element_or<Acc>(residual, dtype, n, 0));
  }
}

void dropout(const Launch& launch, const RowDropout& d, DType dtype, size_t rows, size_t size, const void* x,
             const void* bias, const void* residual, void* y) {
  if (rows * size == 0) return;
  const auto kernel = dtype == DType::kF64 ? &dropout_kernel<double> : &dropout_kernel<float>;
  launch_kernel(launch, kernel, blocks_for(rows * size, 1), kThreads, 0, d, dtype, rows, size, x, bias, residual, y);
}

template <typename Acc>
__global__ void rotary_kernel(RotaryHeads h, const void* x, void* out) {
  const size_t pairs = h.rotated / 2, each = pairs + (h.size - 2 * pairs), all = h.tokens * h.heads * each;
  for (size_t n = blockIdx.x * size_t{blockDim.x} + threadIdx.x; n < all; n += gridDim.x * size_t{blockDim.x}) {
    const size_t p = n % each, head = n / each % h.heads, t = n / each / h.heads, row = t * h.token + head * h.head;
    if (p >= pairs) {
      const size_t at = row + pairs + p;
      put_element<Acc>(out, h.dtype, at, element<Acc>(x, h.dtype, at));
      continue;
    }
    const double angle = static_cast<double>(h.positions[t]) *
                         pow(h.base, -2.0 * static_cast<double>(p) / static_cast<double>(h.rotated));
    const size_t a = row + (h.interleaved ? 2 * p : p), b = h.interleaved ? a + 1 : a + pairs;
    const Acc cosine = static_cast<Acc>(cos(angle)), sine = static_cast<Acc>(h.back ? -sin(angle) : sin(angle));
    const Acc left = element<Acc>(x, h.dtype, a), right = element<Acc>(x, h.dtype, b);
    put_element<Acc>(out, h.dtype, a, left * cosine - right * sine);
    put_element<Acc>(out, h.dtype, b, right * cosine + left * sine);
  }
}

void rotary(const Launch& launch, const RotaryHeads& h, const void* x, void* out) {
  const size_t all = h.tokens * h.heads * (h.size - h.rotated / 2);
  if (all == 0) return;
  const auto kernel = h.dtype == DType::kF64 ? &rotary_kernel<double> : &rotary_kernel<float>;
  launch_kernel(launch, kernel, blocks_for(all, 1), kThreads, 0, h, x, out);
}

constexpr LayerKernels kLayers = {kLayerAbi,   sizeof(LayerKernels), &norm,    &norm_backward,
                                  &activation, &activation_backward, &dropout, &rotary};

}  // namespace
}  // namespace ds::kernels::cuda

const ds::kernels::LayerKernels* ds_device_layer_kernels(uint32_t abi) {
  return abi == ds::kernels::kLayerAbi ? &ds::kernels::cuda::kLayers : nullptr;
}
