// The CUDA table: that it is there and says clearly what is missing without a GPU; with one, that every entry gives
// the bits of the reference. Device memory comes from the driver (libcuda.so.1), so no toolkit is needed to run this.
#include <dlfcn.h>

#include <memory>

#include "support.h"

namespace ds::kernels::test {
namespace {

const KernelTable* cuda_table() { return ds_kernels(kKernelAbi, "cuda"); }

// The driver's part that the tests need, on device 0, in its primary context (which the CUDA runtime uses, too).
class Driver {
 public:
  Driver() {
    library_ = dlopen("libcuda.so.1", RTLD_NOW);
    if (library_ == nullptr) return;
    int device = 0;
    void* context = nullptr;
    ok_ = call<int(unsigned)>("cuInit", 0u) == 0 && call<int(int*, int)>("cuDeviceGet", &device, 0) == 0 &&
          call<int(void**, int)>("cuDevicePrimaryCtxRetain", &context, device) == 0 &&
          call<int(void*)>("cuCtxSetCurrent", context) == 0;
  }
  bool ok() const { return ok_; }
  uintptr_t allocate(size_t bytes) {
    unsigned long long address = 0;
    check(call<int(unsigned long long*, size_t)>("cuMemAlloc_v2", &address, bytes + 256));
    return address;
  }
  void release(uintptr_t address) { call<int(unsigned long long)>("cuMemFree_v2", address); }
  void to_device(uintptr_t to, const void* from, size_t bytes) {
    if (bytes) check(call<int(unsigned long long, const void*, size_t)>("cuMemcpyHtoD_v2", to, from, bytes));
  }
  void to_host(void* to, uintptr_t from, size_t bytes) {
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

  void* library_ = nullptr;
  bool ok_ = false;
};

// A copy of a host buffer on the device, at the same offset behind a 256-byte boundary.
class OnDevice {
 public:
  OnDevice(Driver& driver, Buffer& host)
      : driver_(driver),
        host_(host),
        base_(driver.allocate(host.bytes())),
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

TEST(CudaTableTest, LoadsWithoutAGpu) {
  const KernelTable* table = cuda_table();
  if (table == nullptr) {
    const std::string error = ds_kernels_error(kKernelAbi, "cuda");
    ASSERT_NE(error.find("cannot be loaded"), std::string::npos) << error;
    GTEST_SKIP() << error;
  }
  EXPECT_EQ(table->abi, kKernelAbi);
  EXPECT_EQ(table->size, sizeof(KernelTable));
  EXPECT_STREQ(table->device, "cuda");
  void* entries[(sizeof(KernelTable) - offsetof(KernelTable, copy)) / sizeof(void*)];
  std::memcpy(entries, reinterpret_cast<const char*>(table) + offsetof(KernelTable, copy), sizeof entries);
  for (void* entry : entries) EXPECT_NE(entry, nullptr);
  EXPECT_EQ(ds_kernels(kKernelAbi + 1, "cuda"), nullptr);
  EXPECT_NE(std::string(ds_kernels_error(kKernelAbi + 1, "cuda")).find("another version"), std::string::npos);
}

TEST(CudaTableTest, WithoutAGpuALaunchIsAReadableError) {
  const KernelTable* table = cuda_table();
  if (table == nullptr) GTEST_SKIP() << ds_kernels_error(kKernelAbi, "cuda");
  if (table->device_error() == nullptr) GTEST_SKIP() << "this machine has a GPU";
  const std::string reason = table->device_error();
  float x = 1;
  table->scale({}, &x, DType::kF32, 1, 2.0f);
  EXPECT_EQ(table->last_error(), reason);
  EXPECT_EQ(x, 1.0f);
}

// A missing or foreign library is an error text, not a crash. Needs a process of its own: the library is opened once.
[[noreturn]] void report_missing(const char* path) {
  setenv("DS_CUDA_KERNELS", path, 1);
  std::fputs(cuda_table() != nullptr ? "loaded" : ds_kernels_error(kKernelAbi, "cuda"), stderr);
  std::exit(0);
}

TEST(CudaTableTest, AMissingLibraryIsAReadableError) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(report_missing("/nowhere/lib.so"), testing::ExitedWithCode(0), "/nowhere/lib.so.*toolkit.*make");
  EXPECT_EXIT(report_missing("libm.so.6"), testing::ExitedWithCode(0), "is no kernel library");
}

class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    table = cuda_table();
    if (table == nullptr) GTEST_SKIP() << ds_kernels_error(kKernelAbi, "cuda");
    if (const char* error = table->device_error()) GTEST_SKIP() << "no usable GPU: " << error;
    ASSERT_TRUE(driver.ok());
  }
  void expect_no_error() {
    const char* error = table->last_error();
    EXPECT_EQ(error, nullptr) << error;
  }
  Driver driver;
  const KernelTable* table = nullptr;
};

TEST_F(CudaTest, CopyAccumulateAndScaleEqualTheReference) {
  for (DType dst : kDtypes) {
    for (DType src : kDtypes) {
      for (size_t n : kSizes) {
        for (size_t offset : {0, 1}) {
          for (int entry = 0; entry < 4; ++entry) {
            Buffer from(src, n, offset), want(dst, n, offset);
            from.randomize(1).add_specials();
            want.randomize(2);
            Buffer got = want;
            const auto run = [&](const KernelTable& t, void* to, void* source) {
              if (entry == 0) t.copy({}, to, dst, source, src, n, 0.3f);
              if (entry == 1) t.copy({}, to, dst, source, src, n, 1.0f);
              if (entry == 2) t.accumulate({}, to, dst, source, src, n, 0.3f);
              if (entry == 3) t.scale({}, to, dst, n, 0.3f);
            };
            run(ref_table(), want.data(), from.data());
            OnDevice a(driver, from), b(driver, got);
            run(*table, b.data(), a.data());
            b.fetch();
            expect_no_error();
            ASSERT_TRUE(same(got, want)) << where(*table, dst, src, n, offset) << " entry " << entry;
          }
        }
      }
    }
  }
}

TEST_F(CudaTest, SumSquaresAndFinishNormEqualTheReference) {
  for (DType dtype : kDtypes) {
    std::vector<Buffer> buffers;
    for (size_t i = 0; i < 300; ++i) {  // more than one launch takes
      buffers.emplace_back(dtype, kSizes[i % 14], i % 2);
      buffers.back().randomize(static_cast<unsigned>(i));
    }
    std::vector<Segment> host, device;
    std::vector<std::unique_ptr<OnDevice>> copies;
    for (Buffer& b : buffers) {
      copies.push_back(std::make_unique<OnDevice>(driver, b));
      host.push_back({b.data(), b.size()});
      device.push_back({copies.back()->data(), b.size()});
    }
    double want = 0.5;
    ref_table().sum_squares({}, host.data(), host.size(), dtype, &want);
    Buffer sum(DType::kF64, 1);
    sum.set(0, 0.5);
    OnDevice on(driver, sum);
    table->sum_squares({}, device.data(), device.size(), dtype, static_cast<double*>(on.data()));
    on.fetch();
    expect_no_error();
    EXPECT_EQ(sum.get(0), want) << dtype_name(dtype);

    StepScale scale = {};
    ref_table().finish_norm({}, &want, 2.0f, 1.0f, true, &scale);
    Buffer out(DType::kF64, 2);
    OnDevice result(driver, out);
    table->finish_norm({}, static_cast<double*>(on.data()), 2.0f, 1.0f, true, static_cast<StepScale*>(result.data()));
    result.fetch();
    EXPECT_EQ(std::memcmp(out.data(), &scale, sizeof scale), 0);
  }
}

TEST_F(CudaTest, AdamEqualsTheReference) {
  for (DType grad : kDtypes) {
    for (DType other : kDtypes) {
      for (bool adamw : {true, false}) {
        AdamArgs args = {1e-3, 0.9, 0.999, 1e-8, 0.01, 0.271, 0.003, adamw, grad, other};
        args.master_dtype = args.state_dtype = adamw ? DType::kF32 : other;
        std::vector<Buffer> want, got;  // five per tensor
        for (size_t i = 0; i < 150; ++i) {
          const size_t n = kSizes[i % 14], offset = i % 3 == 0;
          const DType dtypes[] = {args.master_dtype, args.state_dtype, args.state_dtype, grad, other};
          for (int k = 0; k < 5; ++k) {
            want.emplace_back(dtypes[k], n, offset);
            want.back().randomize(static_cast<unsigned>(5 * i + k));
          }
          for (size_t j = 0; j < n; ++j) want[5 * i + 2].set(j, std::abs(want[5 * i + 2].get(j)));
        }
        got = std::vector<Buffer>(want.begin(), want.end());
        std::vector<std::unique_ptr<OnDevice>> copies;
        std::vector<AdamSegment> host, device;
        for (size_t i = 0; i < got.size(); ++i) copies.push_back(std::make_unique<OnDevice>(driver, got[i]));
        for (size_t i = 0; i < got.size(); i += 5) {
          const bool lp = i % 2;
          host.push_back({want[i].data(), want[i + 1].data(), want[i + 2].data(), want[i + 3].data(),
                          lp ? want[i + 4].data() : nullptr, want[i].size()});
          device.push_back({copies[i]->data(), copies[i + 1]->data(), copies[i + 2]->data(), copies[i + 3]->data(),
                            lp ? copies[i + 4]->data() : nullptr, want[i].size()});
        }
        const StepScale scale = {1, 0.7f, 0}, skip = {1, 0.7f, 1};
        ref_table().adam({}, host.data(), host.size(), args, &scale);
        Buffer scales(DType::kF64, 2 * sizeof(StepScale) / 8);
        std::memcpy(scales.data(), &scale, sizeof scale);
        std::memcpy(static_cast<char*>(scales.data()) + sizeof scale, &skip, sizeof skip);
        OnDevice on(driver, scales);
        const StepScale* device_scales = static_cast<StepScale*>(on.data());
        table->adam({}, device.data(), device.size(), args, device_scales + 1);  // skipped: changes nothing
        table->adam({}, device.data(), device.size(), args, device_scales);
        for (auto& copy : copies) copy->fetch();
        expect_no_error();
        for (size_t i = 0; i < got.size(); ++i)
          ASSERT_TRUE(same(got[i], want[i])) << where(*table, grad, other, got[i].size(), i) << " part " << i % 5;
      }
    }
  }
}

}  // namespace
}  // namespace ds::kernels::test
