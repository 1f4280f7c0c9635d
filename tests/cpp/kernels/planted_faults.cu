// Kernels with one fault each, for tests/cpp/kernels/cuda_on_cpu_test.cpp: what the CPU must find. Blocks of 64 threads
// turn 64 numbers round, so that the last comes first. A test looks for the lines by the comments "planted: ...".
#include "kernels/cuda/launch.cuh"

namespace ds::kernels::cuda {
namespace {

constexpr unsigned kSize = 64;

__global__ void right(float* data) {
  DS_SHARED(float, row, [kSize]);
  const unsigned t = threadIdx.x, at = blockIdx.x * kSize + t;
  row[t] = data[at];
  __syncthreads();
  const float mine = row[kSize - 1 - t];
  __syncthreads();
  row[t] = mine;
  data[at] = row[t];
}

__global__ void no_barrier(float* data) {
  DS_SHARED(float, row, [kSize]);
  const unsigned t = threadIdx.x, at = blockIdx.x * kSize + t;
  row[t] = data[at];
  __syncthreads();
  const float mine = row[kSize - 1 - t];
  row[t] = mine + 1;
  data[at] = mine;  // planted: barrier missing
}

__global__ void barrier_in_branch(float* data) {
  DS_SHARED(float, row, [kSize]);
  const unsigned t = threadIdx.x, at = blockIdx.x * kSize + t;
  row[t] = data[at];
  if (t < 40) {
    __syncthreads();  // planted: barrier in a branch
  } else {
    __syncthreads();
  }
  data[at] = row[kSize - 1 - t];
}

__global__ void returned(float* data) {
  const unsigned t = threadIdx.x;
  if (t == 17) return;
  __syncthreads();  // planted: returned before a barrier
  data[blockIdx.x * kSize + t] = 0;
}

__global__ void lane_left_out(float* data) {
  const unsigned t = threadIdx.x, at = blockIdx.x * kSize + t;
  if (t % 32 == 9) return;
  data[at] = __shfl_xor_sync(0xffffffffu, data[at], 1);  // planted: lane left out
}

__global__ void not_filled(float* data) {
  DS_SHARED(float, row, [kSize]);
  const unsigned t = threadIdx.x, at = blockIdx.x * kSize + t;
  if (t != 20) row[t] = data[at];
  __syncthreads();
  data[at] = row[kSize - 1 - t];  // planted: shared memory not filled
}

__global__ void outside_of_shared(float* data) {
  DS_DYNAMIC_SHARED(bytes);
  float* row = reinterpret_cast<float*>(bytes);
  const unsigned t = threadIdx.x, at = blockIdx.x * kSize + t;
  row[t] = data[at];
  __syncthreads();
  data[at] = row[kSize - t];  // planted: index one too far in shared memory
}

__global__ void outside_of_memory(float* data) {
  const unsigned at = blockIdx.x * kSize + threadIdx.x;
  data[at + 1] = 0;  // planted: index one too far
}

__global__ void blocks_race(float* data) {
  if (threadIdx.x == 0) data[0] = static_cast<float>(blockIdx.x);  // planted: blocks that write one number
}

struct Named {
  const char* name;
  void (*kernel)(float*);
};
const Named kKernels[] = {{"right", &right},
                          {"barrier missing", &no_barrier},
                          {"barrier in a branch", &barrier_in_branch},
                          {"returned before a barrier", &returned},
                          {"lane left out", &lane_left_out},
                          {"shared memory not filled", &not_filled},
                          {"index one too far in shared memory", &outside_of_shared},
                          {"index one too far", &outside_of_memory},
                          {"blocks that write one number", &blocks_race}};

}  // namespace
}  // namespace ds::kernels::cuda

// Launches that kernel for `blocks` x 64 numbers; null, or what was found.
extern "C" __attribute__((visibility("default"))) const char* ds_planted(const char* name, float* data,
                                                                         unsigned blocks) {
  using namespace ds::kernels;
  for (const cuda::Named& one : cuda::kKernels)
    if (std::strcmp(one.name, name) == 0)
      cuda::launch_kernel({}, one.kernel, blocks, cuda::kSize, cuda::kSize * sizeof(float), data);
  return cudaGetLastError() == cudaSuccess ? nullptr : cudaGetErrorString(cudaErrorLaunchFailure);
}
