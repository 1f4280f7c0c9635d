#include "comm/boards/watch.h"

#include <unistd.h>

#include "base/clock.h"
#include "base/ranges.h"
#include "comm/boards/board.h"

namespace ds::comm {

namespace {

// A line for each other group of which a call is under way in this process. Ranks that wait for each other in two
// groups look idle to those that know one of them.
std::string calls_elsewhere(const std::vector<std::shared_ptr<Watched>>& all, const Watched& but) {
  std::string text;
  for (const auto& group : all) {
    if (group.get() == &but) continue;
    const std::vector<Flight> flights = group->flights();
    const Flight* const open = oldest_open(flights);
    if (open != nullptr)
      text += "in " + (group->name().empty() ? "another group" : "group " + group->name()) + ": " +
              describe(open->call) + ", number " + std::to_string(open->number) + "\n";
  }
  return text;
}

}  // namespace

void Watch::add(std::weak_ptr<Watched> group) {
  std::lock_guard lock(mutex_);
  erase_if(groups_, [](const auto& each) { return each.expired(); });
  groups_.push_back(std::move(group));
  if (ending_ || pid_ == getpid()) return;
  if (thread_.joinable()) thread_.detach();  // it stayed in the parent
  pid_ = getpid();
  thread_ = std::thread([this] { serve(); });
}

std::vector<std::shared_ptr<Watched>> Watch::groups() const {
  std::vector<std::shared_ptr<Watched>> found;
  std::lock_guard lock(mutex_);
  for (const auto& each : groups_)
    if (auto group = each.lock()) found.push_back(std::move(group));
  return found;
}

void Watch::stop() {
  if (thread_.joinable() &&
      pid_ != getpid()) {  // a forked child: the thread stayed in the parent, perhaps with the lock
    thread_.detach();
    return;
  }
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Watch::serve() {
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, milliseconds(100), [this] { return ending_; });
      if (ending_) return;
    }
    const auto all = groups();
    for (const auto& group : all) {
      DiagnosticCallbacks here = callbacks_;
      here.stacks = [&] { return calls_elsewhere(all, *group) + (callbacks_.stacks ? callbacks_.stacks() : ""); };
      group->look(here);
    }
  }
}

}  // namespace ds::comm
