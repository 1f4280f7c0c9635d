// The part of the device for torch 1, in place of torch2.cpp. Torch 1 asks CUDA for pinned memory and has no generator
// for such a device; Python does not use the device there.
#include <ATen/detail/CUDAHooksInterface.h>

#include "device.h"

namespace standin {

namespace {

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

class CUDAHooks final : public at::CUDAHooksInterface {
 public:
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace

const at::Generator& default_generator(c10::DeviceIndex) {
  TORCH_CHECK(false, "torch 1 has no random numbers on a stand-in device: draw them on the CPU");
}

std::shared_ptr<void> python_frames() { return nullptr; }
std::string text_of_python(void*) { return {}; }

}  // namespace standin
