#include "io/async/aio_contexts.h"

#include <libaio.h>
#include <unistd.h>

namespace ds::io {
namespace {

int room_for(int depth) {
  int room = AioContexts::kDepth;
  while (room < depth) room *= 2;
  return room;
}

}  // namespace

AioContexts::~AioContexts() {
  if (owner_ != getpid()) return;
  for (const auto& [depth, contexts] : free_) {
    for (io_context* context : contexts) io_destroy(context);
  }
}

io_context* AioContexts::take(int depth) {
  const int room = room_for(depth);
  std::lock_guard guard(lock_);
  if (owner_ != getpid()) {
    free_.clear();
    owner_ = getpid();
  }
  std::vector<io_context*>& contexts = free_[room];
  if (!contexts.empty()) {
    io_context* context = contexts.back();
    contexts.pop_back();
    return context;
  }
  io_context_t context = nullptr;
  return io_setup(room, &context) == 0 ? context : nullptr;
}

void AioContexts::give_back(io_context* context, int depth) {
  std::lock_guard guard(lock_);
  if (owner_ == getpid()) free_[room_for(depth)].push_back(context);
}

}  // namespace ds::io
