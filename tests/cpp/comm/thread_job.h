// Jobs whose ranks are threads of one process.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../on_threads.h"
#include "comm/process_mesh.h"
#include "comm/transports/thread_communicator.h"

namespace ds::comm {

// Ranks that are threads meet here: the first member that comes to a key makes the communicators of all.
class Meeting {
 public:
  // `waits`: opening one returns when all members have come, as it does between processes. `peers`: ranks may share
  // memory.
  explicit Meeting(bool waits = false, bool peers = true) : waits_(waits), peers_(peers) {}

  CommunicatorPtr open(const std::string& key, const SubMesh& members) {
    std::unique_lock lock(mutex_);
    auto& made = made_[key];
    if (made.empty()) made = thread_communicators(members.size(), peers_);
    ++openings;
    if (++came_[key] == members.size()) all_came_.notify_all();
    all_came_.wait(lock, [&] { return !waits_ || came_[key] == members.size(); });
    return made[members.rank];
  }
  std::vector<std::string> keys() {
    std::vector<std::string> found;
    for (const auto& entry : made_) found.push_back(entry.first);
    return found;
  }
  std::atomic<int> openings{0};

 private:
  const bool waits_, peers_;
  std::mutex mutex_;
  std::condition_variable all_came_;
  std::map<std::string, std::vector<CommunicatorPtr>> made_;
  std::map<std::string, int> came_;
};

inline JobPtr job_of(int rank, int world, Meeting& meeting) {
  return std::make_shared<Job>(rank, world,
                               [&](const auto& key, const auto& members, bool) { return meeting.open(key, members); });
}

inline void on_ranks_of_job(int world, const std::function<void(int, JobPtr)>& body, bool waits = false) {
  Meeting meeting(waits);
  on_threads(world, [&](int rank) { body(rank, job_of(rank, world, meeting)); });
}

inline void on_waiting_ranks_of_job(int world, const std::function<void(int, JobPtr)>& body) {
  on_ranks_of_job(world, body, /*waits=*/true);
}

}  // namespace ds::comm
