// Operations that can never end, and what is told of them.
//
// [Note: what never ends]
// All calls of the job are let go in thought, as often as something can: a call once all that come before it on its
// stream, on streams for which that one waits, and in its communicator have ended, its device has room for it, and the
// calls that it meets can go, too. A call
// that has not been made counts as one that can go, unless the threads that have made such calls all wait for
// operations that stay. Operations that stay although hosts could still make every missing call are a circle.
// Operations that stay only because hosts wait are a circle after a while: a thread that was never seen may make the
// call.
#pragma once
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "job.h"

namespace fake_nccl {

class Circles {
 public:
  using Key = std::pair<int, int64_t>;  // device, operation

  // `hosts_wait`: hosts that wait make no calls.
  Circles(const Job& job, bool hosts_wait) : job_(job), hosts_wait_(hosts_wait) {
    for (int d = 0; d < kDevices; ++d)
      for (int i = 0; i < job.devices[d].top; ++i) {
        const Call& call = job.devices[d].calls[i];
        if (call.waits()) left_[{d, call.operation}].push_back(&call);
      }
    for (bool moved = true; moved;) {
      moved = false;
      for (auto at = left_.begin(); at != left_.end();) {
        const bool ends = can_end(at->first, at->second);
        at = ends ? left_.erase(at) : std::next(at);
        moved = moved || ends;
      }
    }
  }
  const std::map<Key, std::vector<const Call*>>& left() const { return left_; }

 private:
  bool can_end(const Key& key, const std::vector<const Call*>& calls) const {
    if (!runs(key, calls)) return false;
    for (const Call* call : calls)
      if (!meets(*call)) return false;
    return true;
  }

  bool runs(const Key& key, const std::vector<const Call*>& calls) const {
    if (calls[0]->state == kRunning) return true;
    int running = 0;
    for (const auto& [other, others] : left_) {
      if (other.first != key.first) continue;
      running += others[0]->state == kRunning;
      if (other.second >= key.second) continue;
      for (const Call* before : others)
        for (const Call* call : calls)
          if (before->world == call->world || (call->stream && before->stream == call->stream) ||
              call->after[before - job_.devices[key.first].calls])
            return false;
    }
    return running < kRunningAtOnce;
  }

  bool meets(const Call& call) const {
    if (!call.collective()) return other_end(call, call.peer);
    for (int rank = 0; rank < job_.worlds[call.world].size; ++rank)
      if (rank != call.rank && !other_end(call, rank)) return false;
    return true;
  }

  bool other_end(const Call& call, int rank) const {
    const World& world = job_.worlds[call.world];
    if (!world.here[rank]) return true;
    const int device = world.device[rank];
    const Verb verb = call.verb == kSend ? kRecv : call.verb == kRecv ? kSend : call.verb;
    bool others = false;  // calls of the communicator that come before one that has not been made
    for (int i = 0; i < job_.devices[device].top; ++i) {
      const Call& one = job_.devices[device].calls[i];
      if (one.state == kFree || one.world != call.world || one.rank != rank) continue;
      const auto left = left_.find({device, one.operation});
      const bool alike = call.collective() ? one.collective() : one.verb == verb && one.peer == call.rank;
      if (alike && one.number == call.number)
        return one.state == kAhead || left == left_.end() || runs(left->first, left->second);
      others = others || left != left_.end();
    }
    return !others && may_call(world.callers[rank]);
  }

  bool may_call(const int (&threads)[kCallers]) const {
    if (!hosts_wait_) return true;
    for (const int thread : threads)
      if (thread && !waits(thread)) return true;
    return false;
  }

  bool waits(int thread) const {
    for (const Waiter& waiter : job_.waiters) {
      if (waiter.thread != thread) continue;
      for (const auto& [key, calls] : left_)
        if (key.first == waiter.device && key.second >= waiter.first && key.second <= waiter.last &&
            (!waiter.stream || waiter.stream == calls[0]->stream) && (!waiter.running || calls[0]->state == kRunning))
          return true;
    }
    return false;
  }

  const Job& job_;
  const bool hosts_wait_;
  std::map<Key, std::vector<const Call*>> left_;
};

inline void describe(std::ostream& text, const Job& job, const Call& call) {
  const World& world = job.worlds[call.world];
  const char* const states[] = {"free", "queued", "runs", "under way", "ended"};
  text << "    operation " << call.operation << " on stream " << std::hex << "0x" << call.stream << std::dec << ": "
       << states[call.state] << ", " << verb_name(call.verb);
  if (call.verb == kSend) text << " to rank " << call.peer;
  if (call.verb == kRecv) text << " from rank " << call.peer;
  if (call.verb == kReduce || call.verb == kBroadcast) text << " with root " << call.peer;
  text << " number " << call.number << " of " << call.count << " x " << type_name(call.type) << " in communicator \""
       << world.name << "\", there rank " << call.rank << " of " << world.size << "\n";
}

// All queues, by device.
inline std::string queues(const Job& job) {
  std::ostringstream text;
  for (int d = 0; d < kDevices; ++d) {
    const Device& device = job.devices[d];
    if (device.communicators == 0 && device.top == 0) continue;
    text << "  device " << d << ", of process " << device.pid << ":\n";
    for (const Waiter& waiter : job.waiters)
      if (waiter.thread && waiter.device == d)
        text << "    thread " << waiter.thread << " waits for operations " << waiter.first << " to " << waiter.last
             << (waiter.stream ? ", those of one stream" : "") << (waiter.running ? ", those that run" : "") << "\n";
    std::map<int64_t, std::vector<const Call*>> calls;
    for (int i = 0; i < device.top; ++i)
      if (device.calls[i].state != kFree) calls[device.calls[i].operation].push_back(&device.calls[i]);
    for (const auto& [operation, group] : calls)
      for (const Call* call : group) describe(text, job, *call);
  }
  return text.str();
}

}  // namespace fake_nccl
