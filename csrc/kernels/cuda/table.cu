// The CUDA table. Nothing here touches the driver until an entry is called: the library loads without a GPU.
#include "kernels/cuda/entries.cuh"
#include "kernels/cuda/update.cuh"

namespace ds::kernels::cuda {
namespace {

const char* text_of(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return nullptr;
    case cudaErrorInsufficientDriver:
      return "no NVIDIA driver is installed, or one too old for the CUDA version these kernels were built with";
    case cudaErrorNoDevice: return "no CUDA GPU is visible (is there one, and does CUDA_VISIBLE_DEVICES name it?)";
    case cudaErrorNoKernelImageForDevice:
      return "this GPU is older than compute capability 8.0, for which the CUDA kernels are built";
    default: return cudaGetErrorString(error);
  }
}

const char* last_error() { return text_of(cudaGetLastError()); }

const char* device_error() {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  cudaGetLastError();  // asking is not a failed launch
  return text_of(error == cudaSuccess && devices == 0 ? cudaErrorNoDevice : error);
}

// DS_CUDA_TARGETS comes from cmake/Cuda.cmake: what the library holds code for, "sm_80, sm_90, PTX".
constexpr KernelTable kTable = {
    kKernelAbi,   sizeof(KernelTable), "cuda",       DS_CUDA_TARGETS, &copy,          &accumulate,
    &sum_squares, &finish_norm,        &find_update, &update_name,    &update,        &scale,
    &last_error,  &device_error,       &column_sums, &move_all,       &find_nonfinite};

}  // namespace
}  // namespace ds::kernels::cuda

const ds::kernels::KernelTable* ds_device_kernels(uint32_t abi) {
  return abi == ds::kernels::kKernelAbi ? &ds::kernels::cuda::kTable : nullptr;
}
