// The state of one process, and the run of its operations.
#pragma once
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "circles.h"
#include "fake_nccl.h"
#include "job.h"

namespace fake_nccl {

struct Comm {
  int world = 0, rank = 0, device = 0;
  bool joining = true;  // a thread is in its initialisation
  int async_error = kOk;
  std::set<void*> registered;
};
using CommPtr = std::shared_ptr<Comm>;

// The operations of an opaque cudaStream_t, in order; a thread works them off while there are any.
struct Queue {
  int device = 0, error = kOk;
  std::deque<std::function<void()>> waiting;
  bool worked_off = false;
};

// Bytes that have left before there was a receive.
struct Ahead {
  int device;
  Call* call;
  char* bytes;
};

struct Local {
  std::atomic<Job*> job{nullptr};
  std::mutex opening;
  std::map<std::string, OpenJob> opened;
  std::atomic<int> communicators{0};
  // The lock of the job guards what follows.
  std::map<Comm*, CommPtr> alive;
  std::map<std::string, int64_t> counts;
  std::map<std::string, int> failures;  // by function: the result that its next call gives
  std::map<void*, size_t> memory;
  std::map<void*, Queue> queues;
  std::vector<Ahead> ahead;
  std::string last_error;
  std::set<std::string> hangs;  // functions whose next call stays in the library until its communicator is aborted
  int64_t joins_given_up = 0;
  int64_t ids = 0;
  DeviceCalls device{};
};

inline Local& local() {
  static Local* all = new Local;
  return *all;
}

// The job of that name for this process. Null: there is no memory to share, or this process is in another one.
inline Job* use_job(const std::string& name) {
  Local& here = local();
  const std::lock_guard lock(here.opening);
  Job* const current = here.job;
  if (current && (name == current->name || here.communicators > 0)) return name == current->name ? current : nullptr;
  if (here.opened.empty())
    std::atexit([] {
      for (const auto& [known, open] : local().opened) leave_job(known, open);
    });
  OpenJob& open = here.opened[name];
  if (!open.job) open = open_job(name);
  if (open.job) here.job = open.job;
  return open.job;
}

inline Job& job() {
  Job* found = local().job;
  if (!found) found = use_job(job_here());
  if (found) return *found;
  std::perror("fake NCCL: no memory to share between ranks in /dev/shm");
  std::abort();
}

class Lock {
 public:
  Lock() : job_(job()) { lock(); }
  ~Lock() { pthread_mutex_unlock(&job_.mutex); }
  Lock(const Lock&) = delete;

  void wait(int device) { wait(job_.devices[device].changed); }
  void wait(pthread_cond_t& changed) {
    timespec until{};
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += 100'000'000;
    if (until.tv_nsec >= 1'000'000'000) {
      until.tv_nsec -= 1'000'000'000;
      ++until.tv_sec;
    }
    if (pthread_cond_timedwait(&changed, &job_.mutex, &until) == EOWNERDEAD) pthread_mutex_consistent(&job_.mutex);
    look_for_circles();
  }
  void changed(int device) { pthread_cond_broadcast(&job_.devices[device].changed); }
  void changed(const World& world) {
    for (int rank = 0; rank < world.size; ++rank)
      if (world.here[rank]) changed(world.device[rank]);
  }

  // Every call of the job fails from now on, until all its communicators have gone.
  void end_job(int result, const std::string& reason) {
    if (job_.ended) return;
    job_.ended = result;
    const std::string text = "fake NCCL: the job has ended: " + reason + "\n" + queues(job_);
    std::snprintf(job_.reason, sizeof(job_.reason), "%s", reason.c_str());
    std::snprintf(job_.report, sizeof(job_.report), "%s", text.c_str());
    std::fputs(text.c_str(), stderr);
    for (int device = 0; device < kDevices; ++device) changed(device);
  }

 private:
  void lock() {
    if (pthread_mutex_lock(&job_.mutex) == EOWNERDEAD) pthread_mutex_consistent(&job_.mutex);
  }

  void look_for_circles() {
    constexpr int64_t kEvery = 200'000'000, kSurely = 1'200'000'000;  // ns
    const int64_t time = now();
    if (job_.ended || time - job_.watched < kEvery) return;
    job_.watched = time;
    const char* const circle = "operations wait for each other in a circle";
    if (!Circles(job_, false).left().empty()) return end_job(kInternal, circle);
    bool stayed = false;
    int64_t suspects[kDevices] = {};
    const Circles likely(job_, true);
    for (const auto& [key, calls] : likely.left())
      if (!suspects[key.first]) suspects[key.first] = key.second;
    for (int device = 0; device < kDevices; ++device)
      stayed = stayed || (suspects[device] && suspects[device] == job_.suspects[device]);
    std::copy(suspects, suspects + kDevices, job_.suspects);
    if (!stayed) job_.suspected = time;
    if (stayed && time - job_.suspected > kSurely) end_job(kInternal, std::string(circle) + ", hosts among them");
  }

  Job& job_;
};

// The calling thread waits for operations of a device, as long as this lives. Under the lock.
class Waits {
 public:
  explicit Waits(const Waiter& waiter) {
    for (Waiter& free : job().waiters)
      if (!free.thread) {
        free = waiter;
        mine_ = &free;
        break;
      }
  }
  ~Waits() {
    if (mine_) mine_->thread = 0;
  }
  Waits(const Waits&) = delete;

 private:
  Waiter* mine_ = nullptr;  // null: there is no room for it, and circles through this thread are not found
};

struct Operation {
  int device;
  int64_t number;
  void* stream;
  std::vector<std::pair<CommPtr, Call*>> calls;
  int result = kOk;
};

inline Call* find(int world, int rank, Verb verb, int peer, int64_t number) {
  Device& device = job().devices[job().worlds[world].device[rank]];
  for (int i = 0; i < device.top; ++i) {
    Call& call = device.calls[i];
    const bool alike = verb == kSend || verb == kRecv ? call.verb == verb && call.peer == peer : call.collective();
    if (call.world == world && call.rank == rank && alike && call.number == number &&
        (call.state == kRunning || call.state == kAhead))
      return &call;
  }
  return nullptr;
}

inline bool give(const Call& to, const std::vector<char>& bytes) {
  return copy(to.pid, to.out, const_cast<char*>(bytes.data()), bytes.size(), false);
}

// All ranks are there: fills everybody's output.
inline void compute(Lock& lock, const std::vector<Call*>& calls) {
  const Call& first = *calls[0];
  for (const Call* call : calls)
    if (call->verb != first.verb || call->count != first.count || call->type != first.type || call->op != first.op ||
        call->peer != first.peer)
      return lock.end_job(kInvalidUsage, "calls do not match");
  const size_t bytes = first.bytes();
  Inputs inputs;
  bool good = true;
  for (const Call* call : calls) {
    const bool gives = first.verb != kBroadcast || call->rank == first.peer;
    inputs.emplace_back(gives ? (first.verb == kReduceScatter ? bytes * calls.size() : bytes) : 0);
    good = good && copy(call->pid, call->in, inputs.back().data(), inputs.back().size(), true);
  }
  std::vector<char> all;
  for (const auto& input : inputs) all.insert(all.end(), input.begin(), input.end());
  std::vector<char> out(bytes);
  for (Call* call : calls) {
    const auto reduced = [&](size_t begin) {
      if (reduce(first.type, inputs, begin, first.count, first.op, out.data())) return give(*call, out);
      lock.end_job(kInvalidArgument, "a type that only hardware reduces");
      return false;
    };
    if (first.verb == kAllReduce || (first.verb == kReduce && call->rank == first.peer))
      good = good && reduced(0);
    else if (first.verb == kReduceScatter)
      good = good && reduced(static_cast<size_t>(call->rank) * first.count);
    else if (first.verb != kReduce)  // a gather has the inputs of all, a broadcast that of its root
      good = good && give(*call, all);
  }
  if (!good) return lock.end_job(kRemote, "a process has ended");
  for (Call* call : calls) call->state = kDone;
}

// One of the two is a call of this process.
inline void transfer(Lock& lock, Call& from, Call& to) {
  if (from.count != to.count || from.type != to.type) return lock.end_job(kInvalidUsage, "calls do not match");
  const bool good = to.pid == getpid() ? copy(from.pid, from.in, reinterpret_cast<char*>(to.out), to.bytes(), true)
                                       : copy(to.pid, to.out, reinterpret_cast<char*>(from.in), to.bytes(), false);
  if (!good) return lock.end_job(kRemote, "a process has ended");
  from.state = to.state = kDone;
}

// Whether the bytes of a send may leave before there is a receive.
inline bool goes_ahead(const Call& send) {
  const char* const told = std::getenv("FAKE_NCCL_EAGER");
  size_t bytes = send.bytes();
  for (const auto& [device, call, data] : local().ahead)
    if (call->state == kAhead && call->world == send.world && call->rank == send.rank && call->peer == send.peer)
      bytes += call->bytes();
  return told && bytes <= std::strtoull(told, nullptr, 10);
}

// Does what a running call can do now, for all whom it meets.
inline void progress(Lock& lock, Call& call) {
  const World& world = job().worlds[call.world];
  if (call.state != kRunning) return;
  if (call.collective()) {
    std::vector<Call*> calls;
    for (int rank = 0; rank < world.size; ++rank) {
      Call* const one = world.here[rank] ? find(call.world, rank, call.verb, -1, call.number) : nullptr;
      if (!one || world.aborted) return;
      calls.push_back(one);
    }
    compute(lock, calls);
  } else {
    const Verb other = call.verb == kSend ? kRecv : kSend;
    Call* const met = world.here[call.peer] ? find(call.world, call.peer, other, call.rank, call.number) : nullptr;
    if (met && (!world.aborted || met->state == kAhead)) {
      call.verb == kSend ? transfer(lock, call, *met) : transfer(lock, *met, call);
    } else if (call.verb == kSend && goes_ahead(call)) {
      char* const bytes = new char[call.bytes()];
      std::memcpy(bytes, reinterpret_cast<char*>(call.in), call.bytes());
      call.in = reinterpret_cast<uint64_t>(bytes);
      call.state = kAhead;
      local().ahead.push_back({world.device[call.rank], &call, bytes});
    }
  }
  if (call.state == kDone) lock.changed(world);
}

inline void release(int device, Call& call) {
  Device& of = job().devices[device];
  call.state = kFree;
  while (of.top > 0 && of.calls[of.top - 1].state == kFree) --of.top;
}

// Forgets the bytes that have been taken.
inline void sweep() {
  auto& ahead = local().ahead;
  for (size_t i = ahead.size(); i-- > 0;) {
    if (ahead[i].call->state != kDone) continue;
    release(ahead[i].device, *ahead[i].call);
    delete[] ahead[i].bytes;
    ahead.erase(ahead.begin() + static_cast<int64_t>(i));
  }
}

// Whether it is the first of its stream and of its communicators, and its device has room for it.
inline bool may_start(const Operation& operation) {
  const Device& device = job().devices[operation.device];
  std::set<int64_t> running;
  for (int i = 0; i < device.top; ++i) {
    const Call& call = device.calls[i];
    if (!call.waits() || call.operation == operation.number) continue;
    if (call.state == kRunning) running.insert(call.operation);
    if (call.operation > operation.number) continue;
    for (const auto& [comm, mine] : operation.calls)
      if (call.world == mine->world || (mine->stream && call.stream == mine->stream)) return false;
  }
  int64_t& most = local().counts["most running"];
  if (static_cast<int>(running.size()) < kRunningAtOnce) most = std::max<int64_t>(most, running.size() + 1);
  return static_cast<int>(running.size()) < kRunningAtOnce;
}

inline int broken(const Operation& operation) {
  if (job().ended) return job().ended;
  for (const auto& [comm, call] : operation.calls)
    if (call->state == kRunning && job().worlds[call->world].aborted) return kRemote;
  return kOk;
}

// Returns when it has ended, with an error or without.
inline void run(Lock& lock, Operation& operation) {
  while (!job().ended && !may_start(operation)) lock.wait(operation.device);
  for (auto& [comm, call] : operation.calls) call->state = kRunning;
  const auto runs = [&] {
    for (const auto& [comm, call] : operation.calls)
      if (call->state == kRunning) return true;
    return false;
  };
  if (!job().ended)
    for (auto& [comm, call] : operation.calls) progress(lock, *call);
  while (runs() && (operation.result = broken(operation)) == kOk) lock.wait(operation.device);
  if (operation.result == kOk) operation.result = job().ended;
  for (auto& [comm, call] : operation.calls) {
    World& world = job().worlds[call->world];
    if (operation.result != kOk) {
      if (comm->async_error == kOk) comm->async_error = operation.result;
      world.aborted = true;
      lock.changed(world);
    }
    if (call->state != kAhead) release(operation.device, *call);
  }
  lock.changed(operation.device);
}

// On the thread of its stream.
inline void run_queued(void* given) {
  const std::unique_ptr<Operation> operation(static_cast<Operation*>(given));
  Lock lock;
  run(lock, *operation);
  const auto queue = local().queues.find(operation->stream);
  if (queue != local().queues.end() && queue->second.error == kOk) queue->second.error = operation->result;
}

inline void work_off(void* stream) {
  std::function<void()> next;
  for (;;) {
    {
      const Lock lock;
      Queue& queue = local().queues[stream];
      queue.worked_off = !queue.waiting.empty();
      if (queue.waiting.empty()) return;
      next = std::move(queue.waiting.front());
      queue.waiting.pop_front();
    }
    next();
  }
}

// Puts an operation on its stream; on the null stream, which no device has, waits for it.
inline int queue(Lock& lock, std::unique_ptr<Operation> operation, const std::vector<Range>& ranges) {
  void* const stream = operation->stream;
  if (local().device.queue) {
    const int64_t number = operation->number;
    local().device.queue(stream, ranges.data(), ranges.size(), &run_queued, operation.release(), number);
    return kOk;
  }
  if (!stream) {
    const Waits waits({this_thread(), operation->device, 0, operation->number, operation->number, false});
    run(lock, *operation);
    return operation->result;
  }
  Queue& queue = local().queues[stream];
  queue.device = operation->device;
  queue.waiting.emplace_back([raw = operation.release()] { run_queued(raw); });
  if (!std::exchange(queue.worked_off, true)) std::thread(work_off, stream).detach();
  return kOk;
}

}  // namespace fake_nccl
