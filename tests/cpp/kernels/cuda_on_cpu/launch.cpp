// Launches: in which orders, by whom they are run, and how what is wrong comes back as CUDA's last error.
#include <atomic>
#include <cstring>
#include <mutex>
#include <set>
#include <string>

#include "block.h"
#include "cuda_runtime.h"
#include "on_cpu.h"
#include "sanitizers.h"

namespace cuda_on_cpu {
namespace {

std::atomic<CudaOnCpuRunner> runner{nullptr};
std::atomic<uint64_t> seed{1};
std::atomic<int> orders{kOrders};

// The first error that a thread of the host has not asked for.
struct LastError {
  std::mutex mutex;
  std::string text;

  void set(const std::string& what) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (text.empty()) text = what;
  }
};
const std::shared_ptr<LastError>& last_error() {
  thread_local const auto own = std::make_shared<LastError>();
  return own;
}

std::string run_in_all_orders(const Grid& grid, const std::function<void()>& thread) {
  Machine& machine = Machine::own();
  thread_local uint64_t number = 0;
  const uint64_t with = seed + 1000003 * number++;
  if (kAddressSanitizer || kThreadSanitizer) return machine.run(grid, thread, static_cast<Order>(with % kOrders), with);
  const char* names[kOrders] = {"forward", "reverse", "random", "another random"};
  machine.log().begin_launch(runner != nullptr);
  for (int i = 0; i < orders; ++i) {
    if (i > 0) machine.log().restore();
    std::string error = machine.run(grid, thread, static_cast<Order>(i), with);
    if (!error.empty()) return error;
    if (const void* from = machine.log().end_run(i == 0))
      return source_of(from) + ": what is written here depends on the order of threads (forward, and " + names[i] +
             "): a barrier is missing, or a wait for other work";
  }
  return "";
}

using Work = std::function<void()>;
void run(void* work) {
  (*static_cast<Work*>(work))();
  delete static_cast<Work*>(work);
}
void hand_over(void* stream, Work work) {
  auto* all = new Work(std::move(work));
  const CudaOnCpuRunner other = runner;
  if (other == nullptr) return run(all);
  if (const char* error = other(stream, &run, all)) last_error()->set(error), delete all;
}

}  // namespace

void launch(void* stream, Grid grid, std::function<void()> thread) {
  if (grid.blocks == 0 || grid.threads == 0 || grid.threads > kMostThreads || grid.shared > kMostShared)
    return last_error()->set("a launch of " + std::to_string(grid.blocks) + " blocks of " +
                             std::to_string(grid.threads) + " threads with " + std::to_string(grid.shared) +
                             " bytes of shared memory is refused by a GPU");
  hand_over(stream, [grid, thread = std::move(thread), errors = last_error()] {
    const std::string error = run_in_all_orders(grid, thread);
    if (!error.empty()) errors->set(error);
  });
}

}  // namespace cuda_on_cpu

using namespace cuda_on_cpu;

void ds_cuda_on_cpu_set_runner(CudaOnCpuRunner to) { runner = to; }
void ds_cuda_on_cpu_drop(void* work) { delete static_cast<Work*>(work); }
void ds_cuda_on_cpu_set_orders(uint64_t to, int count) {
  seed = to;
  orders = count < 1 ? 1 : count > kOrders ? kOrders : count;
}

void ds_cuda_on_cpu_accesses(void (*visit)(void*, const void*, size_t, bool), void* context) {
  Machine::own().log().each_run(
      [=](const void* begin, size_t bytes, bool writes) { visit(context, begin, bytes, writes); });
}

static thread_local const char* last_text = "";

cudaError_t cudaGetLastError() {
  static auto* const texts = new std::set<std::string>;  // callers keep what they were given
  static std::mutex mutex;
  const std::scoped_lock lock(mutex, last_error()->mutex);
  const std::string text = std::exchange(last_error()->text, {});
  if (text.empty()) return cudaSuccess;
  last_text = texts->insert(text).first->c_str();
  return cudaErrorLaunchFailure;
}
const char* cudaGetErrorString(cudaError_t) { return last_text; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  hand_over(stream, [=] {
    AccessLog& log = Machine::own().log();
    log.begin_launch(true);
    log.note(reinterpret_cast<uintptr_t>(from), bytes, nullptr);
    log.note(reinterpret_cast<uintptr_t>(to), bytes, to);
    std::memcpy(to, from, bytes);
  });
  return cudaSuccess;
}
