// A library with NCCL's interface for tests without a GPU, which waits where NCCL does: ranks are threads or processes
// of one host, memory is the host's or that of a device that stands in for a GPU (fake_nccl.h). Compiled with
// FAKE_NCCL_OLD it is an NCCL 2.18 without user buffers, with FAKE_NCCL_BROKEN one without ncclAllReduce.
//
// [Note: what waits]
// A call is queued on its stream. A communicator runs its calls one at a time, in the order of calls, over all streams.
// A send ends when its receive runs; between two ranks FAKE_NCCL_EAGER bytes may travel ahead (default: 0). A group is
// one operation, on one stream: its sends and receives progress together. At most four operations run at once on a
// device. Calls that do not match, and a circle of waits (circles.h), end the job: all its calls fail, and every rank's
// queues are printed. The library counts what is alive and fails when told to.
#include "fake_nccl.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "operations.h"

using namespace fake_nccl;

namespace {

struct Id {
  char bytes[128];
};

// Head of ncclConfig_t.
struct Config {
  size_t size;
  unsigned magic, version;
  int blocking;
};

struct Queued {
  Comm* comm;
  Call call;
  void* stream;
};

thread_local int group_depth = 0;
thread_local std::vector<Queued> group;
thread_local std::vector<std::unique_ptr<Waits>> host_waits;

int failure(const char* function) {
  auto& failures = local().failures;
  const auto found = failures.find(function);
  if (found == failures.end()) return kOk;
  const int result = found->second;
  failures.erase(found);
  local().last_error = std::string("told to fail in ") + function;
  return result;
}

int refused(int result, const std::string& why) {
  local().last_error = why;
  return result;
}

// The device of the calling thread, or -1.
int device_here(bool make) {
  const int pid = getpid(), number = local().device.current ? local().device.current() : this_thread();
  auto& devices = job().devices;
  for (int d = 0; d < kDevices; ++d)
    if (devices[d].communicators > 0 && devices[d].pid == pid && devices[d].number == number) return d;
  for (int d = 0; make && d < kDevices; ++d)
    if (devices[d].communicators == 0 && devices[d].top == 0) {
      devices[d].pid = pid;
      devices[d].number = number;
      return d;
    }
  return -1;
}

std::vector<Range> ranges_of(const std::vector<Queued>& calls) {
  std::vector<Range> ranges;
  for (const Queued& queued : calls) {
    const Call& call = queued.call;
    const World& world = job().worlds[queued.comm->world];
    const size_t whole = call.bytes() * static_cast<size_t>(world.size);
    if (call.in)
      ranges.push_back({reinterpret_cast<void*>(call.in), call.verb == kReduceScatter ? whole : call.bytes(), 0});
    if (call.out)
      ranges.push_back({reinterpret_cast<void*>(call.out), call.verb == kAllGather ? whole : call.bytes(), 1});
  }
  return ranges;
}

uint64_t reached(uint64_t address) {
  if (!address || !local().device.reach) return address;
  return reinterpret_cast<uint64_t>(local().device.reach(reinterpret_cast<void*>(address)));
}

// The places of calls for which the stream waits, or that are on it.
std::bitset<kCalls> calls_before(const Device& device, void* stream) {
  std::bitset<kCalls> places;
  if (!local().device.before) return places;
  int64_t numbers[kCalls];
  const size_t count = local().device.before(stream, numbers, kCalls);
  for (int i = 0; i < device.top; ++i)
    places[i] = device.calls[i].waits() && std::count(numbers, numbers + count, device.calls[i].operation) > 0;
  return places;
}

void add_caller(World& world, int rank, int caller) {
  for (int& thread : world.callers[rank]) {
    if (thread == caller) return;
    if (!thread) return static_cast<void>(thread = caller);
  }
}

// Writes the calls down where all ranks see them, and puts them on their stream.
int perform(const std::vector<Queued>& calls) {
  if (calls.empty()) return kOk;
  Lock lock;
  sweep();
  auto operation = std::make_unique<Operation>();
  operation->device = calls[0].comm->device;
  operation->stream = local().device.stream ? local().device.stream(calls[0].stream) : calls[0].stream;
  for (const Queued& queued : calls)
    if (queued.comm->device != operation->device || queued.stream != calls[0].stream)
      return refused(kInvalidUsage, "this library takes groups of one device and one stream");
  if (calls.size() > kCalls) return refused(kInvalidUsage, "this library does not take a group of that many calls");
  Device& device = job().devices[operation->device];
  const auto room = [&] {
    return std::count_if(device.calls, device.calls + kCalls, [](const Call& call) { return call.state == kFree; });
  };
  while (!job().ended && room() < static_cast<int64_t>(calls.size())) lock.wait(operation->device);
  if (job().ended) return refused(job().ended, job().reason);
  operation->number = ++device.operations;
  const std::vector<Range> ranges = ranges_of(calls);
  const std::bitset<kCalls> before = calls_before(device, operation->stream);
  int place = 0;
  for (const Queued& queued : calls) {
    const CommPtr& comm = local().alive.at(queued.comm);
    World& world = job().worlds[comm->world];
    while (device.calls[place].state != kFree) ++place;
    Call& call = device.calls[place] = queued.call;
    device.top = std::max(device.top, place + 1);
    call.state = kQueued;
    call.world = comm->world;
    call.rank = comm->rank;
    call.pid = getpid();
    call.in = reached(call.in);
    call.out = reached(call.out);
    call.stream = reinterpret_cast<uint64_t>(operation->stream);
    call.operation = operation->number;
    call.after = before;
    call.number = call.verb == kSend   ? world.sends[comm->rank][call.peer]++
                  : call.verb == kRecv ? world.receives[comm->rank][call.peer]++
                                       : world.collectives[comm->rank]++;
    add_caller(world, comm->rank, this_thread());
    operation->calls.emplace_back(comm, &call);
  }
  const int result = queue(lock, std::move(operation), ranges);
  if (result != kOk) return refused(result, job().ended ? job().reason : "the communicator was aborted");
  return kOk;
}

// Whether the call was to stay in the library; returns when its communicator is aborted.
bool hung(Lock& lock, const char* function, Comm* given) {
  if (local().hangs.erase(function) == 0) return false;
  const CommPtr comm = local().alive.at(given);
  while (local().alive.count(given)) lock.wait(comm->device);
  return true;
}

int enqueue(const char* function, Verb verb, const void* in, void* out, size_t count, int type, int op, int peer,
            Comm* comm, void* stream) {
  {
    Lock lock;
    if (const int told = failure(function)) return told;
    if (!local().alive.count(comm) || peer >= job().worlds[comm->world].size) return kInvalidArgument;
    if (hung(lock, function, comm)) return kInternal;
    ++local().counts[function];
  }
  if (type < 0 || type > 11 || !count || (verb != kRecv && !in && verb != kBroadcast)) return kInvalidArgument;
  Call call{};
  call.verb = verb;
  call.type = type;
  call.op = op;
  call.peer = peer;
  call.count = count;
  call.in = reinterpret_cast<uint64_t>(in);
  call.out = reinterpret_cast<uint64_t>(out);
  group.push_back({comm, call, stream});
  return group_depth > 0 ? static_cast<int>(kOk) : perform(std::exchange(group, {}));
}

bool waits(int device, uint64_t stream, int64_t last) {
  const Device& of = job().devices[device];
  return std::any_of(of.calls, of.calls + of.top,
                     [&](const Call& call) { return call.waits() && call.stream == stream && call.operation <= last; });
}

void forget(int index) {
  for (Device& device : job().devices)
    for (int i = 0; i < device.top; ++i)
      if (device.calls[i].state == kAhead && device.calls[i].world == index) device.calls[i].state = kDone;
  job().worlds[index] = {};
  sweep();
}

void let_go(const Comm& comm) {
  --job().devices[comm.device].communicators;
  --local().communicators;
  if (--job().worlds[comm.world].alive == 0) forget(comm.world);
  if (--job().communicators == 0) job().ended = kOk;
  if (local().communicators == 0) local().queues.clear();
}

int end(Comm* given, const char* how) {
  Lock lock;
  const auto found = local().alive.find(given);
  if (found == local().alive.end()) return kInvalidArgument;
  const CommPtr comm = found->second;
  if (comm->joining) std::abort();  // a real NCCL would free what the initialisation uses
  local().alive.erase(found);
  for (const Queued& queued : group)
    if (queued.comm == given) std::abort();  // a real NCCL would touch freed memory at the end of the group
  ++local().counts[how];
  local().counts["registrations lost"] += static_cast<int64_t>(comm->registered.size());
  World& world = job().worlds[comm->world];
  Device& device = job().devices[comm->device];
  if (std::string(how) == "aborted") world.aborted = true;
  lock.changed(world);
  const auto left = [&] {
    return std::any_of(device.calls, device.calls + device.top,
                       [&](const Call& call) { return call.waits() && call.world == comm->world; });
  };
  while (left()) lock.wait(comm->device);
  let_go(*comm);
  return kOk;
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
  const std::string here = job_here();
  Job* const named = use_job(here);  // or the one in which this process is
  const Lock lock;
  if (const int told = failure("ncclGetUniqueId")) return told;
  std::memset(id->bytes, 0, sizeof(id->bytes));
  std::string text = named ? here : job().name;
  text += '\n' + std::to_string(getpid()) + '.' + std::to_string(++local().ids);
  if (text.size() >= sizeof(id->bytes)) return refused(kInvalidUsage, "FAKE_NCCL_JOB is too long");
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

FAKE const char* ncclGetLastError(Comm*) {
  const Lock lock;
  if (job().ended) local().last_error = job().reason;
  return local().last_error.c_str();
}

FAKE int ncclCommInitRankConfig(Comm** made, int size, Id id, int rank, Config* config) {
  const std::string name(id.bytes, strnlen(id.bytes, sizeof(id.bytes)));
  const bool in_job = use_job(name.substr(0, name.find('\n'))) != nullptr;
  Lock lock;
  if (const int told = failure("ncclCommInitRankConfig")) return told;
  if (!in_job) return refused(kInvalidUsage, "the id is of another job: set FAKE_NCCL_JOB to the same on all ranks");
  if (config->magic != 0xcafebeef || config->version < 21400 || config->blocking != 1) return kInvalidArgument;
  auto& worlds = job().worlds;
  const auto called = [&](const char* wanted) {
    return static_cast<int>(
        std::find_if(worlds, worlds + kWorlds, [&](const World& one) { return std::strcmp(one.name, wanted) == 0; }) -
        worlds);
  };
  const int known = called(name.c_str()), index = known < kWorlds ? known : called("");
  const int device = device_here(true);
  if (index == kWorlds || device < 0 || size > kRanks)
    return refused(kSystem, "this library has no room for more ranks, devices or communicators");
  World& world = worlds[index];
  if ((world.size && world.size != size) || world.here[rank]) return kInvalidUsage;
  std::memcpy(world.name, name.c_str(), name.size());
  world.size = size;
  world.here[rank] = true;
  world.device[rank] = device;
  add_caller(world, rank, acts_as() ? acts_as() : getpid());  // a helper of the main thread may join
  ++world.alive;
  ++job().devices[device].communicators;
  ++job().communicators;
  ++local().communicators;
  const auto comm = std::make_shared<Comm>();
  comm->world = index;
  comm->rank = rank;
  comm->device = device;
  local().alive[*made = comm.get()] = comm;
  pthread_cond_broadcast(&job().joined);
  const auto whole = [&] { return std::count(world.here, world.here + kRanks, true) == size; };
  const int64_t given_up = local().joins_given_up;
  while (!whole() && !world.aborted && !job().ended && given_up == local().joins_given_up) lock.wait(job().joined);
  comm->joining = false;
  if (whole() || world.aborted) return ++local().counts["created"], kOk;
  const int result = job().ended ? job().ended : kSystem;
  local().alive.erase(std::exchange(*made, nullptr));
  world.here[rank] = false;
  let_go(*comm);
  return refused(result, "the other ranks have not come");
}

FAKE int ncclCommGetAsyncError(Comm* comm, int* result) {
  const Lock lock;
  if (!local().alive.count(comm)) return kInvalidArgument;
  ++local().counts["ncclCommGetAsyncError"];
  *result = comm->async_error != kOk ? comm->async_error : job().ended;
  return kOk;
}

FAKE int ncclCommFinalize(Comm* comm) {
  Lock lock;
  if (const int told = failure("ncclCommFinalize")) return told;
  if (!local().alive.count(comm)) return kInvalidArgument;
  if (hung(lock, "ncclCommFinalize", comm)) return kInternal;
  ++local().counts["finalized"];
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
    Lock lock;
    ++local().counts["groups"];
    Comm* const first = group.empty() ? nullptr : group[0].comm;
    const int told = failure("ncclGroupEnd");
    if (told || (first && local().hangs.count("ncclGroupEnd"))) {
      group.clear();
      return told ? told : hung(lock, "ncclGroupEnd", first) ? kInternal : kOk;
    }
  }
  return perform(std::exchange(group, {}));
}

#ifndef FAKE_NCCL_BROKEN
FAKE int ncclAllReduce(const void* in, void* out, size_t count, int type, int op, Comm* comm, void* stream) {
  return enqueue("ncclAllReduce", kAllReduce, in, out, count, type, op, 0, comm, stream);
}
#endif
FAKE int ncclBroadcast(const void* in, void* out, size_t count, int type, int root, Comm* comm, void* stream) {
  return enqueue("ncclBroadcast", kBroadcast, in, out, count, type, 0, root, comm, stream);
}
FAKE int ncclReduce(const void* in, void* out, size_t count, int type, int op, int root, Comm* comm, void* stream) {
  return enqueue("ncclReduce", kReduce, in, out, count, type, op, root, comm, stream);
}
FAKE int ncclAllGather(const void* in, void* out, size_t count, int type, Comm* comm, void* stream) {
  return enqueue("ncclAllGather", kAllGather, in, out, count, type, 0, 0, comm, stream);
}
FAKE int ncclReduceScatter(const void* in, void* out, size_t count, int type, int op, Comm* comm, void* stream) {
  return enqueue("ncclReduceScatter", kReduceScatter, in, out, count, type, op, 0, comm, stream);
}
FAKE int ncclSend(const void* in, size_t count, int type, int peer, Comm* comm, void* stream) {
  return enqueue("ncclSend", kSend, in, nullptr, count, type, 0, peer, comm, stream);
}
FAKE int ncclRecv(void* out, size_t count, int type, int peer, Comm* comm, void* stream) {
  return enqueue("ncclRecv", kRecv, nullptr, out, count, type, 0, peer, comm, stream);
}

#ifndef FAKE_NCCL_OLD
FAKE int ncclMemAlloc(void** made, size_t bytes) {
  const Lock lock;
  if (const int told = failure("ncclMemAlloc")) return told;
  *made = std::aligned_alloc(512, (bytes / 512 + 1) * 512);  // as NCCL's, at whole multiples of 512
  local().memory[*made] = bytes;
  return kOk;
}
FAKE int ncclMemFree(void* memory) {
  const Lock lock;
  if (!local().memory.erase(memory)) return kInvalidArgument;
  std::free(memory);
  return kOk;
}
FAKE int ncclCommRegister(Comm* comm, void* memory, size_t bytes, void** handle) {
  const Lock lock;
  if (const int told = failure("ncclCommRegister")) return told;
  if (!local().alive.count(comm) || !memory || !bytes) return kInvalidArgument;
  *handle = std::malloc(1);
  comm->registered.insert(*handle);
  ++local().counts["registrations"];
  return kOk;
}
FAKE int ncclCommDeregister(Comm* comm, void* handle) {
  const Lock lock;
  if (!local().alive.count(comm) || !comm->registered.erase(handle)) return kInvalidArgument;
  std::free(handle);
  ++local().counts["deregistrations"];
  return kOk;
}
#endif

// ---- beside NCCL's interface
// -----------------------------------------------------------------------------------------

FAKE void fake_nccl_use_device(const DeviceCalls* device) {
  const Lock lock;
  local().device = device ? *device : DeviceCalls{};
}

FAKE void fake_nccl_memory_grows() {
  Lock lock;
  const int device = device_here(false);
  if (device < 0) return;
  const Device& of = job().devices[device];
  std::set<int64_t> running;
  for (int i = 0; i < of.top; ++i)
    if (of.calls[i].state == kRunning) running.insert(of.calls[i].operation);
  if (running.empty()) return;
  const Waits waits({this_thread(), device, 0, *running.begin(), *running.rbegin(), true});
  const auto left = [&] {
    return std::any_of(of.calls, of.calls + of.top,
                       [&](const Call& call) { return call.state == kRunning && running.count(call.operation); });
  };
  while (!job().ended && left()) lock.wait(device);
}

FAKE void fake_nccl_host_waits(void* stream, int64_t last) {
  const Lock lock;
  const int device = device_here(false);
  if (device < 0) return;
  host_waits.push_back(
      std::make_unique<Waits>(Waiter{this_thread(), device, reinterpret_cast<uint64_t>(stream), 0, last, false}));
}

FAKE void fake_nccl_host_goes_on() {
  const Lock lock;
  host_waits.clear();
}

FAKE int64_t fake_nccl_record(void* stream) {
  const Lock lock;
  const auto found = local().queues.find(stream);
  return found == local().queues.end() ? 0 : job().devices[found->second.device].operations;
}

FAKE int fake_nccl_ended(void* stream, int64_t number) {
  const Lock lock;
  const auto found = local().queues.find(stream);
  return found == local().queues.end() || !waits(found->second.device, reinterpret_cast<uint64_t>(stream), number);
}

FAKE int fake_nccl_wait(void* stream, int64_t number) {
  Lock lock;
  const auto found = local().queues.find(stream);
  if (found == local().queues.end()) return kOk;
  const uint64_t value = reinterpret_cast<uint64_t>(stream);
  const int device = found->second.device;
  const Waits mark({this_thread(), device, value, 0, number, false});
  while (waits(device, value, number)) lock.wait(device);
  const auto still = local().queues.find(stream);
  return still == local().queues.end() ? static_cast<int>(kRemote) : still->second.error;
}

FAKE int64_t fake_nccl_count(const char* what) {
  const Lock lock;
  if (std::strcmp(what, "alive") == 0) return static_cast<int64_t>(local().alive.size());
  if (std::strcmp(what, "memory") == 0) return static_cast<int64_t>(local().memory.size());
  return local().counts[what];
}
FAKE void fake_nccl_fail(const char* function, int result) {
  const Lock lock;
  local().failures[function] = result;
}
FAKE void fake_nccl_async_error(int result) {
  const Lock lock;
  local().last_error = "told to fail later";
  for (const auto& [key, comm] : local().alive) comm->async_error = result;
}
FAKE void fake_nccl_hang(const char* function) {
  const Lock lock;
  local().hangs.insert(function);
}
FAKE void fake_nccl_give_up_joins() {
  const Lock lock;
  ++local().joins_given_up;
  pthread_cond_broadcast(&job().joined);
}
FAKE int fake_nccl_this_thread() { return this_thread(); }
FAKE void fake_nccl_act_as(int thread) { acts_as() = thread; }
FAKE const char* fake_nccl_report() {
  const Lock lock;
  return job().report;
}
FAKE void fake_nccl_reset() {
  const Lock lock;
  local().counts.clear();
  local().failures.clear();
  local().last_error.clear();
  local().hangs.clear();
  job().report[0] = 0;
}
