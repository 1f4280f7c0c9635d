// Everything the engine needs from the device its tensors are on: kernels, where to launch them, host read-back.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/dtype.h"
#include "base/thread_pool.h"
#include "kernels/codes.h"
#include "kernels/table.h"
#include "zero/torch_scratch.h"

namespace ds::zero {

// The kernels' name of a torch type; fails for a type they do not know, naming `what`.
DType kernel_dtype(at::ScalarType type, const char* what);
bool has_kernel_dtype(at::ScalarType type);

// The message of a rank when ranks have failed; it contains the rank's own failure, `own`, if it is one of them.
// `ranks`: the number of failed data-parallel ranks, and the sum of their rank + 1.
template <typename Number>
std::string failure_text(const std::string& own, const Number* ranks, int rank) {
  if (!own.empty()) return "[rank " + std::to_string(rank) + "] " + own + ".";
  const auto count = static_cast<int64_t>(ranks[0]);
  if (count == 1)
    return "data-parallel rank " + std::to_string(static_cast<int64_t>(ranks[1]) - 1) +
           " could not compute its gradients; its own message says why.";
  return std::to_string(count) + " other ranks could not compute their gradients; their own messages say why.";
}

class DeviceContext {
 public:
  // `threads` serves CPU kernels. Fails with the reason where the device's kernels (zero/any_kernels.h) are missing or
  // cannot run. `table`: other kernels than the device's, for tests; they may fail.
  DeviceContext(c10::Device device, int threads, const kernels::KernelTable* table = nullptr);
  // The host beside a device that trains: its kernels are those of the CPU's library, which cannot fail.
  explicit DeviceContext(int host_threads);

  const c10::Device& device() const { return device_; }
  const kernels::KernelTable& table() const { return *table_; }
  // The kernels of codes, called through run() as the table's are (zero/any_codes.h).
  const kernels::CodeKernels& codes() const { return *codes_; }
  int threads() const { return threads_; }

  // Calls `call(launch)`, which runs entries of the table, on the device's current stream; the caller makes the device
  // current. What goes wrong in it is remembered, see [Note: failures]. run_reserved: scratch comes from what reserve()
  // has put by, so that there is no lack of it; on one stream only.
  template <typename Call>
  void run(const Call& call) const {
    run_with(at::Tensor(), call);
  }
  template <typename Call>
  void run_reserved(const Call& call) const {
    run_with(reserved_, call);
  }
  // `bytes`: of scratch as kernels/table.h says; `numel`: elements in all. Throws what torch's allocator throws.
  void reserve(int64_t bytes, int64_t numel);

  // [Note: failures]
  // A kernel that could not be launched, or had no memory, leaves results that are wrong, and says so to the thread
  // alone that called it, which may be one of autograd's. So every call is followed by a question, and the first answer
  // is kept here until the ranks have agreed on it: with the flags at the end of a backward and with the norm, before
  // anything is updated. The kernels of the CPU's library cannot fail: there is nothing to agree on.
  bool may_fail() const { return may_fail_; }
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  void note_failure(const std::string& what) const;  // from any thread
  std::string take_failure() const;                  // empty: there was none

  // dst = src * scale and dst += src * scale, any dtypes, any devices. dst is dense (in any memory order); src has as
  // many elements and may be strided or sparse.
  void copy(const at::Tensor& dst, const at::Tensor& src, float scale) const;
  void accumulate(const at::Tensor& dst, const at::Tensor& src, float scale) const;

  // The same on raw memory of this device, for `numel` elements of dtypes that has_kernel_dtype() accepts.
  void move(void* dst, at::ScalarType dst_type, const void* src, at::ScalarType src_type, int64_t numel, float scale,
            bool add) const;

  // The elements of `src`, dense, in the memory order of a tensor of these sizes and strides, as one dimension.
  at::Tensor flattened(const at::Tensor& src, at::IntArrayRef sizes, at::IntArrayRef strides) const;

  // Scratch in device memory.
  double* sum() const { return static_cast<double*>(sum_.data_ptr()); }
  const at::Tensor& sum_tensor() const { return sum_; }         // the sum, and behind it:
  at::Tensor failures() const { return sum_.narrow(0, 1, 2); }  // how many ranks have failed, and the sum of rank + 1
  kernels::StepScale* step_scale() const { return static_cast<kernels::StepScale*>(step_scale_.data_ptr()); }

  // Starts to bring *step_scale() to the host; the first read_step_scale() waits for that, not for later work on the
  // stream.
  void post_step_scale();
  kernels::StepScale read_step_scale();
  void set_step_scale(const kernels::StepScale& scale);  // of the host's memory: what another device has found
  void check() const;  // fails with the device's own message when one of its kernels could not run

 private:
  DeviceContext(c10::Device device, int threads, const kernels::KernelTable& table, bool may_fail);
  kernels::Launch launch(kernels::Scratch* scratch) const;
  void note_errors(const TorchScratch& scratch) const;
  template <typename Call>
  void run_with(const at::Tensor& reserved, const Call& call) const {
    TorchScratch scratch(device_, reserved);
    call(launch(&scratch));
    if (may_fail_) note_errors(scratch);
  }

  c10::Device device_;
  const int threads_;
  const bool may_fail_;
  std::unique_ptr<ThreadPool> pool_;
  const kernels::KernelTable* table_;
  const kernels::CodeKernels* codes_;
  at::Tensor sum_, step_scale_, step_scale_host_, reserved_;
  mutable std::mutex mutex_;
  mutable std::string failure_;
  mutable std::atomic<bool> failed_{false};
  std::optional<c10::Event> posted_;
  int64_t planned_ = 0;  // the mark in place of posted_ in a step that is planned
  bool arrived_ = true;  // the host has what was posted last
};

// This rank's share of the number of failed ranks and of the sum of their rank + 1.
inline std::array<float, 2> failed_rank(const DeviceContext& device, int rank) {
  return device.failed() ? std::array<float, 2>{1.0f, static_cast<float>(rank + 1)} : std::array<float, 2>{};
}

}  // namespace ds::zero
