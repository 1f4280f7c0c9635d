// A fixed set of worker threads for kernels: the thread count is always explicit, never the machine's.
#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "base/numa.h"

namespace ds {

class ThreadPool {
 public:
  // `threads` >= 1 counts the calling thread: 1 starts no worker and runs everything inline.
  // Throws ErrorKind::kValue for less than 1.
  // On a machine of several memory nodes (`nodes`, as usable_nodes() has them) the threads are spread over them in
  // order, and stay there: with the same n a thread meets the same elements at each call, which lie in its node's
  // memory when the pool touched them first. A thread that is done early helps threads of its own node first.
  ThreadPool(int threads, const std::vector<Processors>& nodes);
  explicit ThreadPool(int threads) : ThreadPool(threads, threads > 1 ? usable_nodes() : std::vector<Processors>()) {}
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Splits [0, n) into chunks that are multiples of `grain` (the last may be shorter) and calls body(begin, end) for
  // each, on the workers and the caller; returns when all are done. The split depends only on n, grain and threads(),
  // so results that depend on it are reproducible. Not re-entrant; one caller at a time (others wait).
  // The first exception a body throws is rethrown here; chunks not yet begun are then dropped.
  // In a forked child, where the workers do not exist, the caller runs all chunks.
  //
  // Virtual although nothing derives from it: a kernel library then runs the pool's code in the module that made the
  // pool, whatever version of it the library was built with.
  virtual void parallel_for(size_t n, size_t grain, const std::function<void(size_t begin, size_t end)>& body);

 private:
  struct Impl;
  int threads_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ds
