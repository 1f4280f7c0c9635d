#include "zero/state_leases.h"

#include <string>
#include <utility>

namespace ds::zero {

// A plane for every buffer that is there now. Buffers change only while nobody holds them.
void StateLeases::follow() {
  std::vector<std::pair<std::string, at::Tensor>> now;
  for (const auto& space : store_.spaces()) {
    if (space.master.data.defined()) now.emplace_back("masters", space.master.data);
    for (const Buffer& slot : space.slots) {
      if (slot.data.defined()) now.emplace_back("optimizer states", slot.data);
    }
  }
  const auto same = [&](size_t i) { return i < now.size() && states_[i].memory.is_same(now[i].second); };
  size_t kept = 0;
  while (kept < states_.size() && same(kept)) ++kept;
  for (; states_.size() > kept; states_.pop_back()) storage_.remove(states_.back().plane);
  for (; kept < now.size(); ++kept) {
    const at::Tensor& memory = now[kept].second;
    states_.push_back({storage_.add(now[kept].first, memory.numel(), memory.scalar_type(), {}, {}, memory), memory});
  }
}

void StateLeases::hold() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (held_.empty()) follow();
  std::vector<storage::Lease> leases;
  for (const State& state : states_) {
    leases.push_back(
        storage_.acquire(state.plane, {0, state.memory.numel()}, storage::Access::kRead, storage::Medium::kDevice));
  }
  held_.push_back(std::move(leases));
}

void StateLeases::let_go() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!held_.empty()) held_.pop_back();  // of whom does not matter: each is of everything
}

void StateLeases::wait() {
  std::vector<State> states;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (held_.empty()) return;
    states = states_;
  }
  for (const State& state : states) {
    storage_.acquire(state.plane, {0, state.memory.numel()}, storage::Access::kUpdate, storage::Medium::kDevice);
  }
}

void StateLeases::clear() {
  wait();
  const std::lock_guard<std::mutex> lock(mutex_);
  for (; !states_.empty(); states_.pop_back()) storage_.remove(states_.back().plane);
}

}  // namespace ds::zero
