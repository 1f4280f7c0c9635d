// The part of the device for torch 2: streams and events for Python, generators, pinned memory, stacks of Python.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceType.h>
#include <torch/csrc/profiler/combined_traceback.h>
#include <torch/library.h>

#include <array>

#include "device.h"
#include "tensors.h"

namespace standin {

namespace {

class GeneratorOfDevice final : public at::CPUGeneratorImpl {
 public:
  explicit GeneratorOfDevice(c10::DeviceIndex device, uint64_t seed = c10::default_rng_seed_val)
      : at::CPUGeneratorImpl(seed) {
    device_ = c10::Device(kStandin, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::DS_STANDIN_TYPE);
  }

 private:
  GeneratorOfDevice* clone_impl() const override {
    auto* copy = new GeneratorOfDevice(device_.index());
    copy->set_state(*get_state());
    return copy;
  }
};

class GuardOfTorch2 final : public Guard {
 public:
  c10::Stream getNewStream(c10::Device device, int) const override { return stream_from_pool(device.index()).c10(); }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &stream_of(stream); }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    count_host_wait(/*copies=*/false);
    if (!waits(kStandinHostWait).is_left_out()) synchronize_device(device < 0 ? current_device() : device);
  }
  void synchronizeEvent(void* event) const override {
    count_host_wait(/*copies=*/false);
    if (event && !waits(kStandinHostWait).is_left_out()) wait_on_host(*static_cast<Mark*>(event));
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    TORCH_CHECK(from && to && reached(from) && reached(to), "both events have to be recorded and reached");
    const auto passed_time = *static_cast<Mark*>(to)->time - *static_cast<Mark*>(from)->time;
    return std::chrono::duration<double, std::milli>(passed_time).count();
  }
};

C10_REGISTER_GUARD_IMPL(DS_STANDIN_TYPE, GuardOfTorch2);

#ifdef DS_STANDIN_IS_HPU
using TorchsHooks = at::HPUHooksInterface;
#else
using TorchsHooks = at::PrivateUse1HooksInterface;
#endif

class Hooks : public TorchsHooks {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device() : exchange_device(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<GeneratorOfDevice>(device < 0 ? current_device() : device);
  }
  at::Device getDeviceFromPtr(void* address) const override {
    for (c10::DeviceIndex device = 0; device < kDevices; ++device)
      if (device_memory(device).mapping.holds(address)) return {kStandin, device};
    TORCH_CHECK(false, address, " is not memory of a stand-in device");
  }
  bool isPinnedPtr(const void* address) const override { return pinned_memory().mapping.holds(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
#ifdef DS_STANDIN_IS_HPU
  void init() const override {}
  bool hasHPU() const override { return true; }
#else
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
#endif
};

#ifdef DS_STANDIN_IS_HPU
struct HooksOfHpu final : Hooks {
  explicit HooksOfHpu(at::HPUHooksArgs) {}
};
using at::HPUHooksRegistry;
using at::RegistererHPUHooksRegistry;
C10_REGISTER_CLASS(HPUHooksRegistry, HPUHooks, HooksOfHpu);

// A torch that is built with CUDA refuses a second kind of device, so that CUDA's part is taken out before its first
// use.
struct NoCuda final : at::CUDAHooksInterface {
  explicit NoCuda(at::CUDAHooksArgs) {}
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, NoCuda);
#else
const bool registered = [] {
  c10::register_privateuse1_backend("standin");  // torch asks the hooks of a device with a name for pinned memory
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();
#endif

// torch has no function of Python for it.
TORCH_LIBRARY(standin, m) {
  m.def("default_generator(int device) -> Generator?",
        [](int64_t device) { return std::optional(default_generator(static_cast<c10::DeviceIndex>(device))); });
}

}  // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* all = new std::array<at::Generator, kDevices>{at::make_generator<GeneratorOfDevice>(0),
                                                             at::make_generator<GeneratorOfDevice>(1)};
  return all->at(device < 0 ? current_device() : device);
}

std::shared_ptr<void> python_frames() {
  return torch::CapturedTraceback::gather(/*python=*/true, /*script=*/false, /*cpp=*/false);
}

std::string text_of_python(void* frames) {
  const torch::SymbolizedTracebacks found = torch::symbolize({static_cast<torch::CapturedTraceback*>(frames)});
  std::string text;
  for (const uint64_t frame : found.tracebacks.at(0)) {
    const auto& at = found.all_frames[frame];
    text += "      " + at.filename + ":" + std::to_string(at.lineno) + " in " + at.funcname + "\n";
  }
  return text;
}

}  // namespace standin
