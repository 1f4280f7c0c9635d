// Device memory for tests, from the driver (libcuda.so.1): no toolkit is needed to run them. Where the CUDA kernels run
// on the CPU (cuda_on_cpu), it is the host's.
#pragma once
#include <dlfcn.h>

#include <deque>
#include <new>

#include "support.h"

namespace ds::kernels::test {

inline bool cuda_runs_on_cpu() {
  const KernelTable* table = ds_kernels(kKernelAbi, "cuda");
  return table != nullptr && std::strcmp(table->isa, "CPU") == 0;
}

// The driver's part that the tests need, on device 0, in its primary context (which the CUDA runtime uses, too).
class Driver {
 public:
  Driver() {
    if ((ok_ = on_host_)) return;
    library_ = dlopen("libcuda.so.1", RTLD_NOW);
    if (library_ == nullptr) return;
    int device = 0;
    void* context = nullptr;
    ok_ = call<int(unsigned)>("cuInit", 0u) == 0 && call<int(int*, int)>("cuDeviceGet", &device, 0) == 0 &&
          call<int(void**, int)>("cuDevicePrimaryCtxRetain", &context, device) == 0 &&
          call<int(void*)>("cuCtxSetCurrent", context) == 0;
  }
  bool ok() const { return ok_; }
  // At a boundary of 256 bytes.
  uintptr_t allocate(size_t bytes) {
    if (on_host_) return reinterpret_cast<uintptr_t>(::operator new (bytes, std::align_val_t{256}));
    unsigned long long address = 0;
    check(call<int(unsigned long long*, size_t)>("cuMemAlloc_v2", &address, bytes + 1));
    return address;
  }
  void release(uintptr_t address) {
    if (on_host_) return ::operator delete (reinterpret_cast<void*>(address), std::align_val_t{256});
    call<int(unsigned long long)>("cuMemFree_v2", address);
  }
  void to_device(uintptr_t to, const void* from, size_t bytes) {
    if (on_host_ && bytes) std::memcpy(reinterpret_cast<void*>(to), from, bytes);
    if (on_host_) return;
    if (bytes) check(call<int(unsigned long long, const void*, size_t)>("cuMemcpyHtoD_v2", to, from, bytes));
  }
  void to_host(void* to, uintptr_t from, size_t bytes) {
    if (on_host_ && bytes) std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
    if (on_host_) return;
    check(call<int()>("cuCtxSynchronize"));
    if (bytes) check(call<int(void*, unsigned long long, size_t)>("cuMemcpyDtoH_v2", to, from, bytes));
  }

 private:
  template <typename Signature, typename... Args>
  int call(const char* name, Args... args) {
    auto* function = reinterpret_cast<Signature*>(dlsym(library_, name));
    return function != nullptr ? function(args...) : -1;
  }
  static void check(int code) { ASSERT_EQ(code, 0) << "CUDA driver error"; }

  const bool on_host_ = cuda_runs_on_cpu();
  void* library_ = nullptr;
  bool ok_ = false;
};

// Scratch for one call of an entry, until it goes: after a fetch.
class DriverScratch final : public Scratch {
 public:
  explicit DriverScratch(Driver& driver) : driver_(driver) {}
  ~DriverScratch() {
    if (base_ != 0) driver_.release(base_);
  }
  void* allocate(size_t bytes) noexcept override {
    if (base_ != 0) driver_.release(base_);  // waits for the device
    return reinterpret_cast<void*>(base_ = driver_.allocate(bytes));
  }

 private:
  Driver& driver_;
  uintptr_t base_ = 0;
};

// A copy of a host buffer on the device, at the same offset behind a 256-byte boundary.
class OnDevice {
 public:
  OnDevice(Driver& driver, Buffer& host)
      : driver_(driver),
        host_(host),
        base_(driver.allocate(host.offset() * dtype_bytes(host.dtype()) + host.bytes())),
        data_(base_ + host.offset() * dtype_bytes(host.dtype())) {
    driver.to_device(data_, host.data(), host.bytes());
  }
  ~OnDevice() { driver_.release(base_); }
  void* data() { return reinterpret_cast<void*>(data_); }
  void fetch() { driver_.to_host(host_.data(), data_, host_.bytes()); }

 private:
  Driver& driver_;
  Buffer& host_;
  uintptr_t base_, data_;
};

// The memory in which kernels find buffers: theirs on the host, or copies on a device until the end.
struct OnHost {
  void* of(Buffer& buffer) { return buffer.data(); }
};
struct OnCuda {
  explicit OnCuda(Driver& driver) : driver(driver) {}
  ~OnCuda() {
    for (OnDevice& copy : copies) copy.fetch();
  }
  void* of(Buffer& buffer) { return copies.emplace_back(driver, buffer).data(); }
  Driver& driver;
  std::deque<OnDevice> copies;
};

// A test of the CUDA table, which is skipped without a GPU.
class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    table = ds_kernels(kKernelAbi, "cuda");
    if (table == nullptr) GTEST_SKIP() << ds_kernels_error(kKernelAbi, "cuda");
    if (const char* error = table->device_error()) GTEST_SKIP() << "no usable GPU: " << error;
    ASSERT_TRUE(driver.ok());
  }
  void expect_no_error() {
    const char* error = table->last_error();
    EXPECT_EQ(error, nullptr) << error;
  }
  // On the CPU a launch is run and compared in several orders of its threads, so with fewer elements.
  static std::vector<size_t> sizes() {
    if (cuda_runs_on_cpu()) return {0, 1, 31, 32, 33, 255, 257, 1025};
    return {std::begin(kSizes), std::end(kSizes)};
  }
  Driver driver;
  const KernelTable* table = nullptr;
};

}  // namespace ds::kernels::test
