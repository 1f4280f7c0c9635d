// Contexts of the kernel's asynchronous transfers, kept for the next file: to destroy one takes some 30 ms, as long as
// writing 30 MB.
#pragma once
#include <sys/types.h>

#include <map>
#include <mutex>
#include <vector>

struct io_context;

namespace ds::io {

class AioContexts {
 public:
  static constexpr int kDepth = 64;  // transfers at a time in one context, at least

  AioContexts() = default;
  ~AioContexts();
  AioContexts(const AioContexts&) = delete;
  AioContexts& operator=(const AioContexts&) = delete;

  // For `depth` transfers at a time; null where the kernel has no (more) contexts.
  io_context* take(int depth = kDepth);

  // Only with nothing on its way; `depth` as it was taken for.
  void give_back(io_context* context, int depth = kDepth);

 private:
  std::mutex lock_;
  std::map<int, std::vector<io_context*>> free_;  // by depth, in powers of two
  pid_t owner_ = 0;                               // contexts stay behind in a fork
};

}  // namespace ds::io
