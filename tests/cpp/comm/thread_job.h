// Jobs whose ranks are threads of one process.
#pragma once
#include <atomic>
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
  CommunicatorPtr open(const std::string& key, const SubMesh& members) {
    std::lock_guard lock(mutex_);
    auto& made = made_[key];
    if (made.empty()) made = thread_communicators(members.size());
    ++openings;
    return made[members.rank];
  }
  std::vector<std::string> keys() {
    std::vector<std::string> found;
    for (const auto& entry : made_) found.push_back(entry.first);
    return found;
  }
  std::atomic<int> openings{0};

 private:
  std::mutex mutex_;
  std::map<std::string, std::vector<CommunicatorPtr>> made_;
};

inline JobPtr job_of(int rank, int world, Meeting& meeting) {
  return std::make_shared<Job>(rank, world,
                               [&](const auto& key, const auto& members) { return meeting.open(key, members); });
}

inline void on_ranks_of_job(int world, const std::function<void(int, JobPtr)>& body) {
  Meeting meeting;
  on_threads(world, [&](int rank) { body(rank, job_of(rank, world, meeting)); });
}

}  // namespace ds::comm
