#include "streams.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdlib>

#include "counts.h"
#include "kernels.h"
#include "memory.h"
#include "nccl.h"

namespace standin {

namespace {

using std::chrono::microseconds;

constexpr size_t kPool = 32;

struct Choices {
  std::atomic<uint64_t> seed{0};
  std::atomic<StandinMode> mode{kStandinAtOnce};
  Choices() {
    if (const char* text = std::getenv("DS_STANDIN_SEED")) seed = std::strtoull(text, nullptr, 10);
    const char* text = std::getenv("DS_STANDIN_MODE");
    const std::string name = text ? text : "";
    mode = name == "lazy" ? kStandinLazy : name == "null" ? kStandinNull : kStandinAtOnce;
  }
};

Choices& choices() {
  static auto* one = new Choices;
  return *one;
}

// A number of its own for each operation and seed (splitmix64).
uint64_t drawn(size_t stream, uint64_t operation) {
  uint64_t x = choices().seed * 0x9e3779b97f4a7c15u + stream * 0xbf58476d1ce4e5b9u + operation;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

struct Streams {
  std::vector<std::unique_ptr<Stream>> all;  // of each device the default stream, and the pool
  std::array<std::atomic<size_t>, kDevices> next{};
  Streams() {
    for (c10::DeviceIndex device = 0; device < kDevices; ++device)
      for (size_t i = 0; i <= kPool; ++i) all.push_back(std::make_unique<Stream>(all.size(), device, i == 0));
  }
  Stream& at(c10::DeviceIndex device, size_t i) { return *all.at(static_cast<size_t>(device) * (kPool + 1) + i); }
};

Streams& streams() {
  static auto* one = new Streams;
  return *one;
}

thread_local c10::DeviceIndex device_now = 0;
thread_local std::array<Stream*, kDevices> streams_now{};

}  // namespace

void Stream::push(uint64_t operation, bool put_off, std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  if (!thread_.joinable()) {
    ended_ = false;
    thread_ = std::thread([this] { run_queue(); });
  }
  queue_.push_back({operation, put_off, std::chrono::steady_clock::now(), std::move(work)});
  changed_.notify_all();
}

void Stream::hurry(uint64_t operation) {
  const std::lock_guard lock(mutex_);
  if (operation <= hurried_) return;
  hurried_ = operation;
  changed_.notify_all();
}

void Stream::wait(uint64_t operation) {
  hurry(operation);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= operation; });
  if (error_.empty()) return;
  const std::string error = std::exchange(error_, {});
  lock.unlock();
  TORCH_CHECK(false, "an operation failed on device standin:", static_cast<int>(device),
              " after it was queued: ", error);
}

bool Stream::done(uint64_t operation) {
  const std::lock_guard lock(mutex_);
  return done_ >= operation;
}

void Stream::put_off(std::unique_lock<std::mutex>& lock, const Work& work) {
  const uint64_t chance = drawn(number, work.operation);
  if (choices().mode == kStandinLazy) {
    const auto until = work.queued + microseconds(1000 + chance % 4000);
    changed_.wait_until(lock, until, [&] { return hurried_ >= work.operation || ended_; });
  } else if (choices().seed != 0 && chance % 8 == 0) {
    changed_.wait_for(lock, microseconds((chance >> 8) % 400), [&] { return ended_; });
  }
}

void Stream::run_queue() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return !queue_.empty() || ended_; });
    if (queue_.empty()) return;
    Work work = std::move(queue_.front());
    queue_.pop_front();
    if (work.put_off) put_off(lock, work);
    lock.unlock();
    std::string error;
    try {
      work.run();
    } catch (const std::exception& e) {
      error = e.what();
    }
    work.run = nullptr;  // what it holds goes before a waiter goes on
    lock.lock();
    if (error_.empty()) error_ = error;
    done_ = work.operation;
    changed_.notify_all();
  }
}

void Stream::end() {
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  thread_ = std::thread();
}

c10::DeviceIndex current_device() { return device_now; }

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  TORCH_CHECK(0 <= device && device < kDevices, "there are ", static_cast<int>(kDevices),
              " stand-in devices, and none has the index ", static_cast<int>(device));
  return std::exchange(device_now, device);
}

Stream& stream_of(const c10::Stream& stream) {
  return stream.id() ? *reinterpret_cast<Stream*>(stream.id()) : streams().at(stream.device_index(), 0);
}

bool has_ended(const Operation& operation) { return streams().all.at(operation.stream)->done(operation.number); }

Stream& current_stream(c10::DeviceIndex device) {
  if (device < 0) device = device_now;
  Stream* now = streams_now.at(device);
  return now ? *now : streams().at(device, 0);
}

Stream& exchange_stream(Stream& stream) {
  Stream& before = current_stream(stream.device);
  streams_now.at(stream.device) = &stream;
  return before;
}

Stream& stream_from_pool(c10::DeviceIndex device) {
  if (device < 0) device = device_now;
  return streams().at(device, 1 + streams().next.at(device)++ % kPool);
}

std::vector<Stream*> streams_of(c10::DeviceIndex device) {
  std::vector<Stream*> all;
  for (size_t i = 0; i <= kPool; ++i) all.push_back(&streams().at(device, i));
  return all;
}

namespace {

// Under the order's mutex.
std::shared_ptr<Operation> next_operation(Stream& stream, std::string name, Stack stack) {
  auto operation = std::make_shared<Operation>();
  operation->name = std::move(name);
  operation->stream = stream.number;
  operation->number = ++stream.queued;
  stream.clock.join(order().host);
  stream.clock.set(stream.number, operation->number);
  operation->before = stream.clock;
  operation->stack = std::move(stack);
  return operation;
}

}  // namespace

uint64_t submit(Stream& stream, std::string name, std::vector<Access> accesses, std::function<void()> work) {
  return runs_nothing() ? 0 : submit_always(stream, std::move(name), std::move(accesses), std::move(work));
}

uint64_t submit_always(Stream& stream, std::string name, std::vector<Access> accesses, std::function<void()> work) {
  const int threads = at::get_num_threads();
  const Stack stack = Stack::here();
  uint64_t number = 0;
  {
    const std::lock_guard lock(order().mutex);
    const OperationPtr operation = next_operation(stream, std::move(name), stack);
    number = operation->number;
    if (!runs_nothing()) {
      order().check(operation, accesses);
      pinned_memory().close(operation, accesses);
    }
    stream.push(number, true, [threads, work = std::move(work)] {
      if (at::get_num_threads() != threads) at::set_num_threads(threads);
      work();
    });
  }
  order().tell();
  return number;
}

void submit_kernel(Stream& stream, std::string name, std::function<void()> kernel) {
  TORCH_CHECK(stream.device == current_device(), "kernel ", name,
              " is launched on a stream of standin:", static_cast<int>(stream.device),
              " while standin:", static_cast<int>(current_device()),
              " is the current device: set a guard for the stream's device");
  count(Count::kKernels);
  if (runs_nothing()) return;
  const Stack stack = Stack::here();
  const std::lock_guard lock(order().mutex);
  const OperationPtr operation = next_operation(stream, std::move(name), stack);
  order().kernel_queued();
  stream.push(operation->number, true, [operation, device = stream.device, kernel = std::move(kernel)] {
    run_kernel(operation, device, kernel);
  });
}

Mark mark(Stream& stream) {
  const std::lock_guard lock(order().mutex);
  if (runs_nothing()) return {&stream, stream.queued, {}, nullptr};
  Mark mark{&stream, stream.queued, stream.clock, nullptr};
  mark.clock.join(order().host);
  return mark;
}

Mark record(Stream& stream) {
  count(Count::kEvents);
  const std::lock_guard lock(order().mutex);
  if (runs_nothing())
    return {&stream,
            stream.queued,
            {},
            std::make_shared<std::chrono::steady_clock::time_point>(std::chrono::steady_clock::now())};
  const OperationPtr operation = next_operation(stream, "event", {});
  Mark mark{&stream, operation->number, operation->before, std::make_shared<std::chrono::steady_clock::time_point>()};
  stream.push(operation->number, false, [time = mark.time] { *time = std::chrono::steady_clock::now(); });
  return mark;
}

void wait(Stream& stream, const Mark& mark) {
  if (!mark.stream || mark.stream == &stream || runs_nothing()) return;
  const std::lock_guard lock(order().mutex);
  stream.clock.join(mark.clock);
  const OperationPtr operation = next_operation(stream, "wait for an event", {});
  stream.push(operation->number, true, [other = mark.stream, reached = mark.operation] { other->wait(reached); });
}

namespace {

void ordered_on_host(const Mark& mark) {
  if (runs_nothing()) return;
  const std::lock_guard lock(order().mutex);
  order().host.join(mark.clock);
  pinned_memory().reopen();
}

}  // namespace

void wait_on_host(const Mark& mark) {
  if (!mark.stream) return;
  {
    const NcclHostWait told(mark);
    mark.stream->wait(mark.operation);
  }
  ordered_on_host(mark);
}

bool passed(const Mark& mark) {
  if (!mark.stream) return true;
  if (!mark.stream->done(mark.operation)) return false;
  ordered_on_host(mark);
  return true;
}

void wait_unseen(Stream& stream) {
  const Mark now = mark(stream);
  const NcclHostWait told(now);
  stream.wait(now.operation);
}

void synchronize_device(c10::DeviceIndex device) {
  for (Stream* stream : streams_of(device)) wait_on_host(mark(*stream));
}

void choose(uint64_t seed, StandinMode mode) {
  if (mode == kStandinNull)  // what is queued ends in the old mode
    for (c10::DeviceIndex device = 0; device < kDevices; ++device) synchronize_device(device);
  choices().seed = seed;
  choices().mode = mode;
}

bool runs_nothing() { return choices().mode == kStandinNull; }

void end_streams() {
  for (c10::DeviceIndex device = 0; device < kDevices; ++device)
    for (Stream* stream : streams_of(device)) stream->end();
}

}  // namespace standin
