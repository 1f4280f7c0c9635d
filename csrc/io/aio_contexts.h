// Contexts of the kernel's asynchronous writes, kept for the next file: to destroy one takes some 30 ms, as long as
// writing 30 MB.
#pragma once
#include <sys/types.h>

#include <mutex>
#include <vector>

struct io_context;

namespace ds::io {

class AioContexts {
 public:
  static constexpr int kDepth = 64;  // writes at a time in one context

  AioContexts() = default;
  ~AioContexts();
  AioContexts(const AioContexts&) = delete;
  AioContexts& operator=(const AioContexts&) = delete;

  // null where the kernel has no (more) contexts.
  io_context* take();

  // Only with nothing on its way.
  void give_back(io_context* context);

 private:
  std::mutex lock_;
  std::vector<io_context*> free_;
  pid_t owner_ = 0;  // contexts stay behind in a fork
};

}  // namespace ds::io
