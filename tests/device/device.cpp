#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>

#include "kernels.h"
#include "memory.h"
#include "tensors.h"

namespace standin {

namespace {

class GeneratorOfDevice final : public at::CPUGeneratorImpl {
 public:
  explicit GeneratorOfDevice(c10::DeviceIndex device, uint64_t seed = c10::default_rng_seed_val)
      : at::CPUGeneratorImpl(seed) {
    device_ = c10::Device(c10::kPrivateUse1, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }

 private:
  GeneratorOfDevice* clone_impl() const override {
    auto* copy = new GeneratorOfDevice(device_.index());
    copy->set_state(*get_state());
    return copy;
  }
};

// What csrc uses of CUDA, too: all of it through c10::impl::VirtualGuardImpl.
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override { return at(exchange_device(device.index())); }
  c10::Device getDevice() const override { return at(current_device()); }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) exchange_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { setDevice(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override { return current_stream(device.index()).c10(); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    const c10::DeviceIndex index = device.has_index() ? device.index() : current_device();
    return streams_of(index).front()->c10();
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream_from_pool(device.index()).c10();
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream_from_pool(device.index()).c10(); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream_of(stream)).c10(); }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &stream_of(stream); }
  bool queryStream(const c10::Stream& stream) const override { return passed(mark(stream_of(stream))); }
  void synchronizeStream(const c10::Stream& stream) const override { wait_on_host(mark(stream_of(stream))); }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    synchronize_device(device < 0 ? current_device() : device);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag) const override {
    TORCH_CHECK(device < 0 || device == stream.device_index(), "an event of standin:", static_cast<int>(device),
                " cannot be recorded on a stream of ", stream.device());
    if (!*event) *event = new Mark;
    *static_cast<Mark*>(*event) = standin::record(stream_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait(stream_of(stream), *static_cast<Mark*>(event));
  }
  bool queryEvent(void* event) const override { return !event || passed(*static_cast<Mark*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) wait_on_host(*static_cast<Mark*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    TORCH_CHECK(from && to && queryEvent(from) && queryEvent(to), "both events have to be recorded and reached");
    const auto passed_time = *static_cast<Mark*>(to)->time - *static_cast<Mark*>(from)->time;
    return std::chrono::duration<double, std::milli>(passed_time).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    device_allocator().recordStream(memory, stream);
  }

 private:
  static c10::Device at(c10::DeviceIndex index) { return {c10::kPrivateUse1, index}; }
};

class Hooks final : public at::PrivateUse1HooksInterface {
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
      if (device_memory(device).mapping.holds(address)) return {c10::kPrivateUse1, device};
    TORCH_CHECK(false, address, " is no memory of a stand-in device");
  }
  bool isPinnedPtr(const void* address) const override { return pinned_memory().mapping.holds(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Loading the library makes the devices.
const bool registered = [] {
  c10::SetAllocator(c10::kPrivateUse1, &device_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  install_fault_handler();
  return true;
}();

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

}  // namespace standin
