// Elements of any dtype, eight at a time. The dtype is a run-time value: all threads of a launch take the same branch,
// which costs nothing beside the memory access, and one kernel serves every combination.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "base/dtype.h"

namespace ds::kernels::cuda {

constexpr int kPack = 8;  // elements per access: 16 bytes of a 16-bit type, two accesses of 16 bytes of fp32

template <typename T>
struct alignas(16) Pack {
  T x[kPack];
};

// Whether packs of `data` may be accessed 16 bytes at a time. A null pointer may.
__device__ inline bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
struct Narrow;
template <>
struct Narrow<float> {
  static __device__ float from(double x) { return static_cast<float>(x); }
};
template <>
struct Narrow<double> {
  static __device__ double from(double x) { return x; }
};
template <>
struct Narrow<__half> {
  static __device__ __half from(double x) { return __float2half_rn(static_cast<float>(x)); }
};
template <>
struct Narrow<__nv_bfloat16> {
  static __device__ __nv_bfloat16 from(double x) { return __float2bfloat16_rn(static_cast<float>(x)); }
};
// fp32 results need no detour through fp64.
__device__ inline void put(float& out, float x) { out = x; }
__device__ inline void put(double& out, float x) { out = x; }
__device__ inline void put(__half& out, float x) { out = __float2half_rn(x); }
__device__ inline void put(__nv_bfloat16& out, float x) { out = __float2bfloat16_rn(x); }
template <typename T>
__device__ void put(T& out, double x) {
  out = Narrow<T>::from(x);
}

template <typename T, typename Acc>
__device__ void load_pack(const void* data, size_t i, Acc (&x)[kPack]) {
  const Pack<T> pack = *reinterpret_cast<const Pack<T>*>(static_cast<const T*>(data) + i);
#pragma unroll
  for (int k = 0; k < kPack; ++k) x[k] = static_cast<Acc>(widen(pack.x[k]));
}

template <typename T, typename Acc>
__device__ void store_pack(void* data, size_t i, const Acc (&x)[kPack]) {
  Pack<T> pack;
#pragma unroll
  for (int k = 0; k < kPack; ++k) put(pack.x[k], x[k]);
  *reinterpret_cast<Pack<T>*>(static_cast<T*>(data) + i) = pack;
}

// Elements [i, i + kPack) of aligned data; i is a multiple of kPack.
template <typename Acc>
__device__ void load(const void* data, DType dtype, size_t i, Acc (&x)[kPack]) {
  switch (dtype) {
    case DType::kF32: return load_pack<float>(data, i, x);
    case DType::kF16: return load_pack<__half>(data, i, x);
    case DType::kBF16: return load_pack<__nv_bfloat16>(data, i, x);
    case DType::kF64: return load_pack<double>(data, i, x);
  }
}

template <typename Acc>
__device__ void store(void* data, DType dtype, size_t i, const Acc (&x)[kPack]) {
  switch (dtype) {
    case DType::kF32: return store_pack<float>(data, i, x);
    case DType::kF16: return store_pack<__half>(data, i, x);
    case DType::kBF16: return store_pack<__nv_bfloat16>(data, i, x);
    case DType::kF64: return store_pack<double>(data, i, x);
  }
}

// One element at any alignment.
template <typename Acc>
__device__ void load(const void* data, DType dtype, size_t i, Acc (&x)[1]) {
  switch (dtype) {
    case DType::kF32: x[0] = static_cast<Acc>(static_cast<const float*>(data)[i]); return;
    case DType::kF16: x[0] = static_cast<Acc>(widen(static_cast<const __half*>(data)[i])); return;
    case DType::kBF16: x[0] = static_cast<Acc>(widen(static_cast<const __nv_bfloat16*>(data)[i])); return;
    case DType::kF64: x[0] = static_cast<Acc>(static_cast<const double*>(data)[i]); return;
  }
}

template <typename Acc>
__device__ void store(void* data, DType dtype, size_t i, const Acc (&x)[1]) {
  switch (dtype) {
    case DType::kF32: put(static_cast<float*>(data)[i], x[0]); return;
    case DType::kF16: put(static_cast<__half*>(data)[i], x[0]); return;
    case DType::kBF16: put(static_cast<__nv_bfloat16*>(data)[i], x[0]); return;
    case DType::kF64: put(static_cast<double*>(data)[i], x[0]); return;
  }
}

// Calls step(i, width) for the elements [begin, end) that are this thread's among `threads`: packs of kPack where
// `packed` (all pointers aligned, begin a multiple of kPack), single elements elsewhere. `width` is an
// std::integral_constant-like tag: Width<kPack> or Width<1>.
template <int N>
struct Width {
  static constexpr int value = N;
};

template <typename Step>
__device__ void for_elements(size_t begin, size_t end, size_t thread, size_t threads, bool packed, const Step& step) {
  size_t tail = begin;
  if (packed) {
    tail = begin + (end - begin) / kPack * kPack;
    for (size_t i = begin + thread * kPack; i < tail; i += threads * kPack) step(i, Width<kPack>());
  }
  for (size_t i = tail + thread; i < end; i += threads) step(i, Width<1>());
}

// One element.
template <typename Acc>
__device__ Acc element(const void* data, DType dtype, size_t i) {
  Acc x[1];
  load(data, dtype, i, x);
  return x[0];
}

}  // namespace ds::kernels::cuda
