#include "zero/states/state_leases.h"

#include <utility>

#include "base/blocking_region.h"

namespace ds::zero {

void StateLeases::hold(const std::vector<std::pair<const ParamSpace*, const Buffer*>>& more) {
  std::vector<storage::Lease> leases;
  // Adds each row that rests in memory. A row in files cannot be copied from there by another thread.
  const auto add = [&](const ParamSpace& space, const Buffer& buffer) {
    for (const plan::Bucket& bucket : space.map.buckets) {
      const plan::Range row = space.row_in(buffer, bucket);
      if (store_.storage()->resting(buffer.plane, row))
        leases.push_back(store_.lease(buffer, row, storage::Access::kRead));
    }
  };
  for (const ParamSpace& space : store_.spaces()) {
    add(space, space.master);
    for (const Buffer& slot : space.slots) add(space, slot);
  }
  for (const auto& [space, buffer] : more) add(*space, *buffer);
  const auto lock = locked(mutex_);
  held_.push_back(std::move(leases));
}

void StateLeases::let_go() {
  const auto lock = locked(mutex_);
  if (!held_.empty()) held_.pop_back();  // of whom does not matter: each is of everything
  changed_.notify_all();
}

void StateLeases::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return held_.empty(); });
}

}  // namespace ds::zero
