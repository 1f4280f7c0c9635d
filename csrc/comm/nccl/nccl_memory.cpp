#include "comm/nccl/nccl_memory.h"

#include <utility>

#include "base/error.h"

namespace ds::comm {

namespace {

// Whether things may be given back. A device that cannot be waited for any more has nothing under way.
bool quiet(const std::function<bool()>& quiesce) noexcept {
  try {
    return !quiesce || quiesce();
  } catch (const std::exception&) {
    return true;
  }
}

}  // namespace

NcclRegistration::NcclRegistration(const NcclCommPtr& communicator, void* data, size_t bytes)
    : communicator_(communicator),
      quiesce_(communicator->member().quiesce),
      handle_(communicator->register_memory(data, bytes)) {}

void NcclRegistration::release() {
  void* handle = std::exchange(handle_, nullptr);
  if (!handle) return;
  const NcclCommPtr communicator = communicator_.lock();
  if (communicator && quiet(quiesce_)) communicator->deregister_memory(handle);
}

NcclBuffer::NcclBuffer(const NcclCommPtr& communicator, size_t bytes)
    : library_(communicator->library()), quiesce_(communicator->member().quiesce), bytes_(bytes) {
  communicator->check();
  const nccl::Result result = library_->buffer_calls().mem_alloc(&data_, bytes);
  if (result != nccl::kSuccess)
    fail(ErrorKind::kRuntime, "NCCL communicator \"", communicator->name(), "\", rank ", communicator->rank(),
         ": ncclMemAlloc of ", bytes, " bytes failed: ", library_->explain(result), ". ", library_->described(),
         ". Free memory of the device, or use an ordinary tensor.");
  try {
    registration_ = std::make_unique<NcclRegistration>(communicator, data_, bytes);
  } catch (...) {
    library_->buffer_calls().mem_free(data_);
    throw;
  }
}

NcclBuffer::~NcclBuffer() {
  if (!quiet(quiesce_)) return;  // the process is ending, and the device may be gone before us
  registration_.reset();
  library_->buffer_calls().mem_free(data_);
}

}  // namespace ds::comm
