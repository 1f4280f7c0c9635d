#include "zero/state_leases.h"

#include <utility>

namespace ds::zero {

void StateLeases::hold() {
  std::vector<storage::Lease> leases;
  const auto add = [&](const Buffer& buffer) {
    leases.push_back(store_.lease(buffer, {0, buffer.numel}, storage::Access::kRead));
  };
  for (const ParamSpace& space : store_.spaces()) {
    add(space.master);
    for (const Buffer& slot : space.slots) add(slot);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  held_.push_back(std::move(leases));
}

void StateLeases::let_go() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!held_.empty()) held_.pop_back();  // of whom does not matter: each is of everything
  changed_.notify_all();
}

void StateLeases::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return held_.empty(); });
}

}  // namespace ds::zero
