#include "base/thread_pool.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "base/condition_variable.h"
#include "base/error.h"

namespace ds {
namespace {

// Chunks per thread: enough that a thread which lost its core for a while leaves work for the others to take.
constexpr size_t kChunksPerThread = 4;
// Number of times that a thread looks for work, or for the end of it, before it sleeps. The kernels of one optimizer
// step follow each other within microseconds, and a sleep with its wake-up costs 5 to 50 of them.
constexpr int kSpins = 2000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct Job {
  const std::function<void(size_t, size_t)>* body = nullptr;
  size_t n = 0;
  size_t chunk = 0;   // elements per chunk
  size_t chunks = 0;  // in all
};

// Chunks [next, end) of one thread's share. Shares are contiguous, so that with the same n a thread meets the same
// memory at each call; who is done early takes from others.
struct alignas(64) Share {
  std::atomic<size_t> next{0};
  size_t end = 0;
};

}  // namespace

struct ThreadPool::Impl {
  const int threads;
  int spins = 0;
  const pid_t owner = getpid();
  std::mutex caller;  // held by the one running parallel_for
  std::mutex mutex;   // guards sleeping and waking, and `failure`
  ConditionVariable work_cv, done_cv;
  std::atomic<uint64_t> generation{0};  // counts jobs; workers wait for it to change
  std::atomic<int> busy{0};             // workers that have not left the present job
  std::atomic<bool> stop{false};
  std::atomic<bool> failed{false};
  std::exception_ptr failure;
  Job job;
  std::vector<Share> shares;
  std::vector<std::vector<int>> orders;
  std::vector<std::thread> workers;

  Impl(int count, const std::vector<Processors>& nodes) : threads(count), shares(count) {
    const std::vector<size_t> node = spread_over(nodes, count);
    orders = helping_orders(node);
    const unsigned cores = std::thread::hardware_concurrency();
    spins = cores >= static_cast<unsigned>(count) ? kSpins : 0;  // spinning on a core that another thread needs
    for (int i = 1; i < count; ++i) {
      const Processors home = nodes.size() > 1 ? nodes[node[i]] : Processors();
      workers.emplace_back([this, i, home] {
        if (!home.empty()) stay_on(home);
        work(i);
      });
    }
  }

  void run_chunk(size_t index) {
    if (failed.load(std::memory_order_relaxed)) return;
    try {
      const size_t begin = index * job.chunk;
      (*job.body)(begin, std::min(job.n, begin + job.chunk));
    } catch (...) {
      std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
      failed.store(true, std::memory_order_relaxed);
    }
  }

  void run_shares(int self) {
    for (int whose : orders[self]) {
      Share& share = shares[whose];
      for (;;) {
        const size_t index = share.next.fetch_add(1, std::memory_order_relaxed);
        if (index >= share.end) break;
        run_chunk(index);
      }
    }
  }

  void work(int self) {
    uint64_t seen = 0;
    for (;;) {
      for (int i = 0; i < spins && generation.load(std::memory_order_acquire) == seen; ++i) pause();
      if (generation.load(std::memory_order_acquire) == seen) {
        std::unique_lock lock(mutex);
        work_cv.wait(lock, [&] { return generation.load(std::memory_order_acquire) != seen; });
      }
      ++seen;
      if (stop.load(std::memory_order_acquire)) return;
      run_shares(self);
      if (busy.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        std::lock_guard lock(mutex);  // the caller is either before its check or already waiting
        done_cv.notify_one();
      }
    }
  }

  void publish() {
    {
      std::lock_guard lock(mutex);
      generation.fetch_add(1, std::memory_order_release);
    }
    work_cv.notify_all();
  }

  void run(const Job& next) {
    std::lock_guard one_caller(caller);
    job = next;
    failure = nullptr;
    failed.store(false, std::memory_order_relaxed);
    for (int i = 0; i < threads; ++i) {
      shares[i].next.store(next.chunks * i / threads, std::memory_order_relaxed);
      shares[i].end = next.chunks * (i + 1) / threads;
    }
    busy.store(threads - 1, std::memory_order_relaxed);
    publish();
    run_shares(0);
    for (int i = 0; i < spins && busy.load(std::memory_order_acquire) != 0; ++i) pause();
    {
      std::unique_lock lock(mutex);
      done_cv.wait(lock, [&] { return busy.load(std::memory_order_acquire) == 0; });
    }
    if (failure) {
      std::exception_ptr first = failure;
      failure = nullptr;
      std::rethrow_exception(first);
    }
  }
};

ThreadPool::ThreadPool(int threads, const std::vector<Processors>& nodes) : threads_(threads) {
  if (threads < 1) fail(ErrorKind::kValue, "a thread pool needs at least 1 thread, got ", threads);
  if (threads > 1) impl_ = std::make_unique<Impl>(threads, nodes);
}

ThreadPool::~ThreadPool() {
  if (!impl_) return;
  if (impl_->owner != getpid()) {  // forked: the threads are not here to be joined, and the locks may be held
    (void)impl_.release();
    return;
  }
  impl_->stop.store(true, std::memory_order_release);
  impl_->publish();
  for (std::thread& worker : impl_->workers) worker.join();
}

void ThreadPool::parallel_for(size_t n, size_t grain, const std::function<void(size_t, size_t)>& body) {
  if (n == 0) return;
  if (threads_ == 1) return body(0, n);
  grain = std::max<size_t>(grain, 1);
  const size_t grains = (n + grain - 1) / grain;
  const size_t wanted = std::min(grains, kChunksPerThread * static_cast<size_t>(threads_));
  const size_t chunk = (grains + wanted - 1) / wanted * grain;
  const size_t chunks = (n + chunk - 1) / chunk;
  if (chunks == 1 || impl_->owner != getpid()) {
    for (size_t begin = 0; begin < n; begin += chunk) body(begin, std::min(n, begin + chunk));
    return;
  }
  impl_->run(Job{&body, n, chunk, chunks});
}

}  // namespace ds
