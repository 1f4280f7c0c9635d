#include "zero/torch_scratch.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <exception>
#include <utility>

namespace ds::zero {

TorchScratch::TorchScratch(c10::Device device, at::Tensor reserved) : device_(device), reserved_(std::move(reserved)) {}

void* TorchScratch::allocate(size_t bytes) noexcept {
  if (reserved_.defined() && static_cast<size_t>(reserved_.numel()) >= bytes) return reserved_.data_ptr();
  const std::string what =
      "a kernel had no memory for its " + std::to_string(bytes) + " bytes of scratch on " + device_.str() + ": ";
  try {
    held_ = at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().device(device_).dtype(at::kByte));
    return held_.data_ptr();
  } catch (const c10::Error& error) {
    error_ = what + error.what_without_backtrace();
  } catch (const std::exception& error) {
    error_ = what + error.what();
  }
  return nullptr;
}

}  // namespace ds::zero
