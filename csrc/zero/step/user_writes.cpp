#include "zero/step/user_writes.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include "base/error.h"
#include "base/ranges.h"

namespace ds::zero {

UserWrites::UserWrites(ParamStore& store, std::function<void()> before_change)
    : store_(store), before_change_(std::move(before_change)), versions_(store.size()), came_home_(store.size()) {
  know();
}

void UserWrites::know() {
  for (size_t param = 0; param < store_.size(); ++param) know(param);
}

void UserWrites::know(size_t param) {
  versions_[param] = version_of(store_.spec(param).tensor);
  came_home_[param] = 0;
}

void UserWrites::bring_home() {
  for (size_t param = 0; param < store_.size(); ++param) bring_home(param);
}

void UserWrites::bring_home(size_t param) {
  if (!store_.at_home(param)) bring_home(param, store_.spec(param).tensor);
}

void UserWrites::bring_home(size_t param, const at::Tensor& value) {
  store_.bring_home(param, value);
  came_home_[param] = 1;
}

std::vector<size_t> UserWrites::found() {
  std::vector<size_t> written;
  for (size_t param = 0; param < store_.size(); ++param) {
    const ParamSpec& spec = store_.spec(param);
    const bool has_masters = store_.space_of(param).has_masters();
    if (spec.sharded) {
      if (spec.sharded->user_wrote() || (has_masters && spec.sharded->slice_written())) written.push_back(param);
    } else if (has_masters && (came_home_[param] || versions_[param] != version_of(spec.tensor))) {
      written.push_back(param);
    }
  }
  return written;
}

void UserWrites::adopt() {
  for (const ShardedParamPtr& other : store_.others()) {
    if (!other->user_wrote()) continue;
    before_change_();
    if (other->write_back()) add_name(other->name());
  }
  const std::vector<size_t> written = found();
  if (written.empty()) return;
  at::NoGradGuard no_grad;
  before_change_();
  for (size_t param : written) {
    if (adopt(param)) add_name(store_.spec(param).name);
    know(param);
  }
}

void UserWrites::add_name(const std::string& name) {
  if (!contains(names_, name)) names_.push_back(name);
}

bool UserWrites::adopt(size_t param) {
  const ParamSpec& spec = store_.spec(param);
  const ParamSpace& space = store_.space_of(param);
  bool changed = false;
  if (spec.sharded) {
    if (spec.sharded->reshaped())
      fail(ErrorKind::kRuntime, "parameter '", spec.name,
           "' has changed its shape or dtype after "
           "deepspeed.initialize: the optimizer's states no longer fit. Change it before initialize");
    if (spec.sharded->user_wrote()) changed = spec.sharded->write_back();
  }
  if (!space.has_masters()) return changed;
  const auto index = store_.position(param).index;
  for (size_t e = space.map.first[index]; e < space.map.first[index + 1]; ++e) {
    const plan::Extent& extent = space.map.extents[e];
    if (extent.rank != space.rank()) continue;
    const auto lease = [&](const Buffer& buffer, storage::Access access) {
      const int64_t begin = space.offset_in(buffer, extent);
      return store_.lease(buffer, {begin, begin + extent.numel}, access);
    };
    const storage::Lease weights = lease(space.lp, storage::Access::kRead);
    const storage::Lease masters = lease(space.master, storage::Access::kUpdate);
    const at::Tensor master = masters.data(), weight = weights.data().to(master.device());
    const at::Tensor differs = master.to(weight.scalar_type()).ne(weight);
    if (!differs.any().item<bool>()) continue;
    master.copy_(at::where(differs, weight.to(master.scalar_type()), master));
    changed = true;
  }
  return changed;
}

}  // namespace ds::zero
