// The state that the ranks of a job share, as threads or processes of one host: a file in memory with the calls that
// have not ended, by device, and the communicators. One lock guards it, and the state of each process.
//
// The job is named by FAKE_NCCL_JOB, else by MASTER_ADDR and MASTER_PORT, else it is this process; an id of NCCL
// carries the name. A process that finds the file unused makes it anew, so a killed job leaves nothing to the next one.
#pragma once
#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <bitset>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>

#include "reductions.h"

namespace fake_nccl {

enum Result {
  kOk = 0,
  kSystem = 2,
  kInternal = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemote = 6,
  kInProgress = 7
};

constexpr int kRanks = 16, kWorlds = 256, kDevices = 64, kCalls = 512, kCallers = 4, kWaiters = 256;
constexpr int kRunningAtOnce = 4;  // operations, on a device

enum Verb { kAllReduce, kReduce, kBroadcast, kAllGather, kReduceScatter, kSend, kRecv };
inline const char* verb_name(Verb verb) {
  static const char* const names[] = {"all_reduce",     "reduce", "broadcast", "all_gather",
                                      "reduce_scatter", "send",   "recv"};
  return names[verb];
}
enum State {
  kFree,
  kQueued,
  kRunning,
  kAhead,  // a send that has ended, and whose bytes have not been taken
  kDone
};

struct Call {
  State state;
  Verb verb;
  int type, op, peer;  // peer: or the root
  size_t count;
  int world, rank, pid;
  uint64_t in, out;   // addresses in its process
  uint64_t stream;    // 0: the null stream
  int64_t number;     // among the collectives of the communicator, its sends to that peer, or its receives from there
  int64_t operation;  // of the device, in the order of calls; calls of a group are one
  std::bitset<kCalls> after;  // calls of the device for which its stream waits, by place; of those that are older

  bool waits() const { return state == kQueued || state == kRunning; }
  bool collective() const { return verb != kSend && verb != kRecv; }
  size_t bytes() const { return count * bytes_of(type); }
};

struct Device {
  int pid, number;  // of its process
  int communicators;
  int64_t operations;  // so far
  int top;             // calls below it are in use, or free
  pthread_cond_t changed;
  Call calls[kCalls];
};

struct World {
  char name[128];
  int size, alive;
  bool here[kRanks], aborted;
  int device[kRanks];
  int callers[kRanks][kCallers];  // threads for which was joined or that made calls: they may make the next one
  int64_t collectives[kRanks], sends[kRanks][kRanks], receives[kRanks][kRanks];  // called
};

// A thread of a host that waits for operations of a device.
struct Waiter {
  int thread, device;
  uint64_t stream;      // 0: all
  int64_t first, last;  // operations
  bool running;         // only those that run
};

struct Job {
  bool made;
  char name[128];
  pthread_mutex_t mutex;
  pthread_cond_t joined;       // a rank has come to a communicator
  int communicators;           // alive
  int ended;                   // a Result, where it is not kOk
  int64_t watched;             // ns: when circles were looked for last
  int64_t suspects[kDevices];  // an operation that could only go on if a waiting host did; 0: none
  int64_t suspected;           // ns: since when
  char reason[256], report[1 << 16];
  Device devices[kDevices];
  World worlds[kWorlds];
  Waiter waiters[kWaiters];
};

inline int64_t now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

inline int& acts_as() {  // the thread for which the calling one joins a communicator; 0: for itself
  static thread_local int other = 0;
  return other;
}

inline int this_thread() {
  static thread_local const int id = static_cast<int>(syscall(SYS_gettid));
  return acts_as() ? acts_as() : id;
}

inline void make_job(Job& job, const std::string& name) {
  std::strncpy(job.name, name.c_str(), sizeof(job.name) - 1);
  pthread_mutexattr_t kind;
  pthread_mutexattr_init(&kind);
  pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&job.mutex, &kind);
  pthread_condattr_t waits;
  pthread_condattr_init(&waits);
  pthread_condattr_setpshared(&waits, PTHREAD_PROCESS_SHARED);
  pthread_condattr_setclock(&waits, CLOCK_MONOTONIC);
  for (Device& device : job.devices) pthread_cond_init(&device.changed, &waits);
  pthread_cond_init(&job.joined, &waits);
  job.made = true;
}

inline std::string job_here() {
  if (const char* told = std::getenv("FAKE_NCCL_JOB")) return told;
  const char *address = std::getenv("MASTER_ADDR"), *port = std::getenv("MASTER_PORT");
  if (address && port) return std::string(address) + "_" + port;
  return "process_" + std::to_string(getpid());
}

inline std::string path_of_job(const std::string& name) {
  std::string path = "/dev/shm/fake_nccl." + std::to_string(getuid()) + "." + name;
  std::replace(path.begin() + 9, path.end(), '/', '_');
  return path;
}

struct OpenJob {
  Job* job = nullptr;  // null, with errno: there is no memory to share
  int file = -1;
};

inline OpenJob open_job(const std::string& name) {
  const int file = open(path_of_job(name).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) return {};
  const bool alone = flock(file, LOCK_EX | LOCK_NB) == 0;
  if (!alone) flock(file, LOCK_SH);  // whoever makes it is ready
  if ((alone && ftruncate(file, 0) != 0) || ftruncate(file, sizeof(Job)) != 0) return {};
  void* const at = mmap(nullptr, sizeof(Job), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (at == MAP_FAILED) return {};
  Job* const job = static_cast<Job*>(at);
  if (!job->made) make_job(*job, name);
  flock(file, LOCK_SH);                                // for as long as this process lives
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);  // others copy from and to the memory of this one
  return {job, file};
}

// The last one takes the file away.
inline void leave_job(const std::string& name, const OpenJob& open) {
  if (flock(open.file, LOCK_EX | LOCK_NB) == 0) unlink(path_of_job(name).c_str());
}

// Copies between this process and another one. False: it has ended.
inline bool copy(int pid, uint64_t theirs, char* ours, size_t bytes, bool reads) {
  char* const there = reinterpret_cast<char*>(theirs);
  if (pid == getpid()) {
    if (bytes > 0) std::memcpy(reads ? ours : there, reads ? there : ours, bytes);
    return true;
  }
  for (size_t done = 0; done < bytes;) {
    const iovec mine{ours + done, bytes - done}, other{there + done, bytes - done};
    const ssize_t moved = (reads ? process_vm_readv : process_vm_writev)(pid, &mine, 1, &other, 1, 0);
    if (moved <= 0 && errno != EINTR) return false;
    done += moved > 0 ? static_cast<size_t>(moved) : 0;
  }
  return true;
}

}  // namespace fake_nccl
