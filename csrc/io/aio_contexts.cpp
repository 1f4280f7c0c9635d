#include "io/aio_contexts.h"

#include <libaio.h>
#include <unistd.h>

namespace ds::io {

AioContexts::~AioContexts() {
  if (owner_ != getpid()) return;
  for (io_context* context : free_) io_destroy(context);
}

io_context* AioContexts::take() {
  std::lock_guard<std::mutex> guard(lock_);
  if (owner_ != getpid()) {
    free_.clear();
    owner_ = getpid();
  }
  if (!free_.empty()) {
    io_context* context = free_.back();
    free_.pop_back();
    return context;
  }
  io_context_t context = nullptr;
  return io_setup(kDepth, &context) == 0 ? context : nullptr;
}

void AioContexts::give_back(io_context* context) {
  std::lock_guard<std::mutex> guard(lock_);
  if (owner_ == getpid()) free_.push_back(context);
}

}  // namespace ds::io
