// A library with NCCL's interface for tests without a GPU: memory is the host's, streams are ignored, the ranks of a
// communicator are threads of one process. Every collective is computed when all ranks have come to it. It counts what
// is alive and fails when told to (functions fake_nccl_*). Compiled with FAKE_NCCL_OLD it is an NCCL 2.18 without user
// buffers, with FAKE_NCCL_BROKEN one without ncclAllReduce.
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace {

enum Result { kOk = 0, kSystem = 2, kInvalidArgument = 4, kInvalidUsage = 5, kRemote = 6, kInProgress = 7 };
enum Op { kSum, kProd, kMax, kMin, kAvg };

struct Id {
  char bytes[128];
};

// Head of ncclConfig_t.
struct Config {
  size_t size;
  unsigned magic, version;
  int blocking;
};

struct Call {
  std::string what;
  const void* in;
  void* out;
  size_t count;
  int type, op, root;
};

struct Meeting {
  std::map<int, Call> calls;
  int left = 0;
  bool done = false;
  int result = kOk;
};

struct World {
  int size = 0;
  std::set<int> here;
  std::map<int64_t, std::shared_ptr<Meeting>> meetings;  // by number of the collective
  std::map<std::pair<int, int>, std::deque<std::vector<char>>> mail;
  bool aborted = false;
};

struct Comm {
  std::shared_ptr<World> world;
  int rank = 0;
  int64_t collectives = 0;
  int busy = 0;  // how often InProgress is still said
  int async_error = kOk;
  std::set<void*> registered;
};

struct State {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, std::shared_ptr<World>> worlds;
  std::set<Comm*> alive;
  std::map<std::string, int64_t> counts;
  std::map<std::string, int> failures;  // by function: the result that its next call gives
  std::map<void*, size_t> memory;
  std::string last_error;
  int busy = 0;  // for every call from now on: how often it says InProgress
  int64_t ids = 0;
};

State& state() {
  static State* all = new State;
  return *all;
}

struct Queued {
  Comm* comm;
  Call call;
  int peer;  // of send and recv
};

thread_local int group_depth = 0;
thread_local std::vector<Queued> group;

size_t bytes_of(int type) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return sizes[type];
}

float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// Enough for tests: normal numbers and zero, rounded to nearest by cutting half a unit.
struct Half {
  uint16_t bits;
  operator double() const {
    const uint32_t sign = (bits & 0x8000u) << 16, rest = bits & 0x7fffu;
    return rest == 0 ? bits_to_float(sign) : bits_to_float(sign | ((rest << 13) + (112u << 23)));
  }
  static Half from(double v) {
    const uint32_t f = float_to_bits(static_cast<float>(v));
    const uint32_t rest = f & 0x7fffffffu;
    const uint32_t rounded = rest < (113u << 23) ? 0 : (rest - (112u << 23) + 0x1000u) >> 13;
    return {static_cast<uint16_t>((f >> 16 & 0x8000u) | rounded)};
  }
};
struct Brain {
  uint16_t bits;
  operator double() const { return bits_to_float(static_cast<uint32_t>(bits) << 16); }
  static Brain from(double v) {
    return {static_cast<uint16_t>((float_to_bits(static_cast<float>(v)) + 0x8000u) >> 16)};
  }
};
template <typename T>
T from_double(double v) {
  if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, Brain>)
    return T::from(v);
  else
    return static_cast<T>(v);
}

template <typename T>
void reduce_as(const std::vector<std::vector<char>>& inputs, size_t begin, size_t count, int op, void* out) {
  for (size_t i = 0; i < count; ++i) {
    double total = 0;
    for (size_t r = 0; r < inputs.size(); ++r) {
      T element;
      std::memcpy(&element, inputs[r].data() + (begin + i) * sizeof(T), sizeof(T));
      const double v = static_cast<double>(element);
      if (r == 0)
        total = v;
      else if (op == kSum || op == kAvg)
        total += v;
      else if (op == kProd)
        total *= v;
      else
        total = (op == kMax) == (v > total) ? v : total;
    }
    const T result = from_double<T>(op == kAvg ? total / static_cast<double>(inputs.size()) : total);
    std::memcpy(static_cast<char*>(out) + i * sizeof(T), &result, sizeof(T));
  }
}

int reduce(int type, const std::vector<std::vector<char>>& inputs, size_t begin, size_t count, int op, void* out) {
  switch (type) {
    case 0: reduce_as<int8_t>(inputs, begin, count, op, out); return kOk;
    case 1: reduce_as<uint8_t>(inputs, begin, count, op, out); return kOk;
    case 2: reduce_as<int32_t>(inputs, begin, count, op, out); return kOk;
    case 3: reduce_as<uint32_t>(inputs, begin, count, op, out); return kOk;
    case 4: reduce_as<int64_t>(inputs, begin, count, op, out); return kOk;
    case 5: reduce_as<uint64_t>(inputs, begin, count, op, out); return kOk;
    case 6: reduce_as<Half>(inputs, begin, count, op, out); return kOk;
    case 7: reduce_as<float>(inputs, begin, count, op, out); return kOk;
    case 8: reduce_as<double>(inputs, begin, count, op, out); return kOk;
    case 9: reduce_as<Brain>(inputs, begin, count, op, out); return kOk;
    default: return kInvalidArgument;  // fp8 needs hardware
  }
}

// All ranks are there: fills everybody's output.
int compute(const World& world, Meeting& meeting) {
  const Call& first = meeting.calls.begin()->second;
  for (const auto& [rank, call] : meeting.calls)
    if (call.what != first.what || call.count != first.count || call.type != first.type || call.op != first.op ||
        call.root != first.root)
      return kInvalidUsage;
  const size_t bytes = bytes_of(first.type), count = first.count;
  const size_t size = static_cast<size_t>(world.size);
  const size_t taken = (first.what == "reduce_scatter" ? count * size : count) * bytes;
  std::vector<std::vector<char>> inputs;
  for (const auto& [rank, call] : meeting.calls) {
    const char* in = static_cast<const char*>(call.in);
    inputs.emplace_back(in, in + (first.what == "broadcast" && rank != first.root ? 0 : taken));
  }
  for (const auto& [rank, call] : meeting.calls) {
    int result = kOk;
    if (call.what == "all_reduce" || (call.what == "reduce" && rank == call.root))
      result = reduce(call.type, inputs, 0, count, call.op, call.out);
    else if (call.what == "reduce_scatter")
      result = reduce(call.type, inputs, static_cast<size_t>(rank) * count, count, call.op, call.out);
    else if (call.what == "broadcast")
      std::memcpy(call.out, inputs[static_cast<size_t>(call.root)].data(), count * bytes);
    else if (call.what == "all_gather")
      for (size_t r = 0; r < size; ++r)
        std::memcpy(static_cast<char*>(call.out) + r * count * bytes, inputs[r].data(), count * bytes);
    if (result != kOk) return result;
  }
  return kOk;
}

int collective(std::unique_lock<std::mutex>& lock, const Queued& queued) {
  Comm& comm = *queued.comm;
  World& world = *comm.world;
  const int64_t number = comm.collectives++;
  auto& meeting = world.meetings[number];
  if (!meeting) meeting = std::make_shared<Meeting>();
  const auto mine = meeting;
  mine->calls[comm.rank] = queued.call;
  if (static_cast<int>(mine->calls.size()) == world.size) {
    mine->result = compute(world, *mine);
    mine->done = true;
    world.meetings.erase(number);
    state().changed.notify_all();
  }
  if (!state().changed.wait_for(lock, std::chrono::seconds(20), [&] { return mine->done || world.aborted; }))
    return kSystem;
  return mine->done ? mine->result : kRemote;
}

int post(const Queued& queued) {
  const Call& call = queued.call;
  const char* in = static_cast<const char*>(call.in);
  queued.comm->world->mail[{queued.comm->rank, queued.peer}].emplace_back(in, in + call.count * bytes_of(call.type));
  state().changed.notify_all();
  return kOk;
}

int fetch(std::unique_lock<std::mutex>& lock, const Queued& queued) {
  World& world = *queued.comm->world;
  auto& box = world.mail[{queued.peer, queued.comm->rank}];
  if (!state().changed.wait_for(lock, std::chrono::seconds(20), [&] { return !box.empty() || world.aborted; }))
    return kSystem;
  if (box.empty()) return kRemote;
  const std::vector<char> letter = std::move(box.front());
  box.pop_front();
  if (letter.size() != queued.call.count * bytes_of(queued.call.type)) return kInvalidUsage;
  std::memcpy(queued.call.out, letter.data(), letter.size());
  return kOk;
}

int failure(const char* function) {
  auto& failures = state().failures;
  const auto found = failures.find(function);
  if (found == failures.end()) return kOk;
  const int result = found->second;
  failures.erase(found);
  state().last_error = std::string("told to fail in ") + function;
  return result;
}

int perform(const std::vector<Queued>& calls) {
  std::unique_lock lock(state().mutex);
  int result = kOk;
  for (const Queued& queued : calls)
    if (queued.call.what == "send") post(queued);
  for (const Queued& queued : calls) {
    if (queued.call.what == "send") continue;
    const int one = queued.call.what == "recv" ? fetch(lock, queued) : collective(lock, queued);
    if (result == kOk) result = one;
  }
  if (result == kOk && state().busy > 0 && !calls.empty()) {
    for (const Queued& queued : calls) queued.comm->busy = state().busy;
    return kInProgress;
  }
  return result;
}

int enqueue(const char* function, Comm* comm, Call call, int peer = -1) {
  {
    const std::lock_guard lock(state().mutex);
    if (const int told = failure(function)) return told;
    if (!state().alive.count(comm)) return kInvalidArgument;
    ++state().counts[function];
  }
  if (call.type < 0 || call.type > 11 || !call.count || (call.what != "recv" && !call.in && call.what != "broadcast"))
    return kInvalidArgument;
  group.push_back({comm, std::move(call), peer});
  return group_depth > 0 ? static_cast<int>(kOk) : perform(std::exchange(group, {}));
}

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default")))

FAKE int ncclGetVersion(int* version) {
#ifdef FAKE_NCCL_OLD
  *version = 21803;
#else
  *version = 22809;
#endif
  return kOk;
}

FAKE int ncclGetUniqueId(Id* id) {
  const std::lock_guard lock(state().mutex);
  if (const int told = failure("ncclGetUniqueId")) return told;
  std::memset(id->bytes, 0, sizeof(id->bytes));
  const std::string text = "fake " + std::to_string(++state().ids);
  std::memcpy(id->bytes, text.data(), text.size());
  return kOk;
}

FAKE const char* ncclGetErrorString(int result) {
  static const char* const texts[] = {"no error",
                                      "unhandled cuda error",
                                      "unhandled system error",
                                      "internal error",
                                      "invalid argument",
                                      "invalid usage",
                                      "remote process exited or there was a network error",
                                      "in progress"};
  return result >= 0 && result <= 7 ? texts[result] : "unknown result code";
}

FAKE const char* ncclGetLastError(Comm*) { return state().last_error.c_str(); }

FAKE int ncclCommInitRankConfig(Comm** made, int size, Id id, int rank, Config* config) {
  const std::lock_guard lock(state().mutex);
  if (const int told = failure("ncclCommInitRankConfig")) return told;
  if (config->magic != 0xcafebeef || config->version < 21400 || config->blocking != 0) return kInvalidArgument;
  auto& world = state().worlds[id.bytes];
  if (!world) world = std::make_shared<World>();
  if ((world->size && world->size != size) || !world->here.insert(rank).second) return kInvalidUsage;
  world->size = size;
  *made = new Comm;
  (*made)->world = world;
  (*made)->rank = rank;
  state().alive.insert(*made);
  ++state().counts["created"];
  return kInProgress;
}

FAKE int ncclCommGetAsyncError(Comm* comm, int* result) {
  const std::lock_guard lock(state().mutex);
  if (!state().alive.count(comm)) return kInvalidArgument;
  if (comm->async_error != kOk) {
    *result = comm->async_error;
    return kOk;
  }
  const bool whole = static_cast<int>(comm->world->here.size()) == comm->world->size;
  *result = !whole || (comm->busy > 0 && comm->busy-- > 0) ? kInProgress : kOk;
  return kOk;
}

FAKE int ncclCommFinalize(Comm* comm) {
  const std::lock_guard lock(state().mutex);
  if (const int told = failure("ncclCommFinalize")) return told;
  if (!state().alive.count(comm)) return kInvalidArgument;
  ++state().counts["finalized"];
  comm->busy = 2;
  return kInProgress;
}

static int end(Comm* comm, const char* how) {
  const std::lock_guard lock(state().mutex);
  if (!state().alive.erase(comm)) return kInvalidArgument;
  for (const Queued& queued : group)
    if (queued.comm == comm) std::abort();  // a real NCCL would touch freed memory at the end of the group
  ++state().counts[how];
  state().counts["registrations lost"] += static_cast<int64_t>(comm->registered.size());
  if (std::string(how) == "aborted") {
    comm->world->aborted = true;
    state().changed.notify_all();
  }
  delete comm;
  return kOk;
}

FAKE int ncclCommDestroy(Comm* comm) { return end(comm, "destroyed"); }
FAKE int ncclCommAbort(Comm* comm) { return end(comm, "aborted"); }

FAKE int ncclGroupStart() {
  ++group_depth;
  return kOk;
}

FAKE int ncclGroupEnd() {
  if (group_depth == 0) return kInvalidUsage;
  if (--group_depth > 0) return kOk;
  {
    const std::lock_guard lock(state().mutex);
    ++state().counts["groups"];
    if (const int told = failure("ncclGroupEnd")) {
      group.clear();
      return told;
    }
  }
  return perform(std::exchange(group, {}));
}

#ifndef FAKE_NCCL_BROKEN
FAKE int ncclAllReduce(const void* in, void* out, size_t count, int type, int op, Comm* comm, void*) {
  return enqueue("ncclAllReduce", comm, {"all_reduce", in, out, count, type, op, 0});
}
#endif
FAKE int ncclBroadcast(const void* in, void* out, size_t count, int type, int root, Comm* comm, void*) {
  return enqueue("ncclBroadcast", comm, {"broadcast", in, out, count, type, 0, root});
}
FAKE int ncclReduce(const void* in, void* out, size_t count, int type, int op, int root, Comm* comm, void*) {
  return enqueue("ncclReduce", comm, {"reduce", in, out, count, type, op, root});
}
FAKE int ncclAllGather(const void* in, void* out, size_t count, int type, Comm* comm, void*) {
  return enqueue("ncclAllGather", comm, {"all_gather", in, out, count, type, 0, 0});
}
FAKE int ncclReduceScatter(const void* in, void* out, size_t count, int type, int op, Comm* comm, void*) {
  return enqueue("ncclReduceScatter", comm, {"reduce_scatter", in, out, count, type, op, 0});
}
FAKE int ncclSend(const void* in, size_t count, int type, int peer, Comm* comm, void*) {
  return enqueue("ncclSend", comm, {"send", in, nullptr, count, type, 0, 0}, peer);
}
FAKE int ncclRecv(void* out, size_t count, int type, int peer, Comm* comm, void*) {
  return enqueue("ncclRecv", comm, {"recv", nullptr, out, count, type, 0, 0}, peer);
}

#ifndef FAKE_NCCL_OLD
FAKE int ncclMemAlloc(void** made, size_t bytes) {
  const std::lock_guard lock(state().mutex);
  if (const int told = failure("ncclMemAlloc")) return told;
  *made = std::malloc(bytes);
  state().memory[*made] = bytes;
  return kOk;
}
FAKE int ncclMemFree(void* memory) {
  const std::lock_guard lock(state().mutex);
  if (!state().memory.erase(memory)) return kInvalidArgument;
  std::free(memory);
  return kOk;
}
FAKE int ncclCommRegister(Comm* comm, void* memory, size_t bytes, void** handle) {
  const std::lock_guard lock(state().mutex);
  if (const int told = failure("ncclCommRegister")) return told;
  if (!state().alive.count(comm) || !memory || !bytes) return kInvalidArgument;
  *handle = std::malloc(1);
  comm->registered.insert(*handle);
  ++state().counts["registrations"];
  return kOk;
}
FAKE int ncclCommDeregister(Comm* comm, void* handle) {
  const std::lock_guard lock(state().mutex);
  if (!state().alive.count(comm) || !comm->registered.erase(handle)) return kInvalidArgument;
  std::free(handle);
  ++state().counts["deregistrations"];
  return kOk;
}
#endif

// ---- what tests ask and order
// ----------------------------------------------------------------------------------------

// Of "alive", "memory" (both now); "created", "finalized", "destroyed", "aborted", "groups", "registrations",
// "deregistrations", "registrations lost", and names of functions (so far).
FAKE int64_t fake_nccl_count(const char* what) {
  const std::lock_guard lock(state().mutex);
  if (std::strcmp(what, "alive") == 0) return static_cast<int64_t>(state().alive.size());
  if (std::strcmp(what, "memory") == 0) return static_cast<int64_t>(state().memory.size());
  return state().counts[what];
}
FAKE void fake_nccl_fail(const char* function, int result) {
  const std::lock_guard lock(state().mutex);
  state().failures[function] = result;
}
// As if the library's own threads had found it, for all communicators there are.
FAKE void fake_nccl_async_error(int result) {
  const std::lock_guard lock(state().mutex);
  state().last_error = "told to fail later";
  for (Comm* comm : state().alive) comm->async_error = result;
}
FAKE void fake_nccl_busy(int times) {
  const std::lock_guard lock(state().mutex);
  state().busy = times;
}
FAKE void fake_nccl_reset() {
  const std::lock_guard lock(state().mutex);
  state().counts.clear();
  state().failures.clear();
  state().last_error.clear();
  state().busy = 0;
}
