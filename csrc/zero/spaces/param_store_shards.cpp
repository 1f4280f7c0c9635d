// Slices of sharded parameters: where a ParamStore puts them, and what becomes of them.
#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/ranges.h"
#include "zero/spaces/param_store.h"

namespace ds::zero {

namespace {

constexpr int64_t kAlignBytes = 256;
int64_t aligned(int64_t bytes) { return (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes; }

void check_cut(const ShardedParam& sharded, const std::string& name, const std::string& rule,
               const comm::Communicator& ranks) {
  if (sharded.parts() == ranks.size() && sharded.rank() == ranks.rank()) return;
  fail(ErrorKind::kValue, "parameter '", name, "' is cut into ", sharded.parts(), " slices, of which this is number ",
       sharded.rank(), "; by the rule '", rule, "' its ranks are ", ranks.size(), ", and this is rank ", ranks.rank(),
       ": name the rule before the parameter is sharded");
}

}  // namespace

// Parameters came with slices that were cut for the ranks of their spaces.
void ParamStore::check_slices() const {
  for (size_t param = 0; param < specs_.size(); ++param)
    check_cut(*specs_[param].sharded, specs_[param].name, specs_[param].rule, *space_of(param).ranks().shard);
  for (const ShardedParamPtr& other : others_)
    check_cut(*other, other->name(), other->rule, *ranks_of_other(*other).shard);
}

SpaceRanks ParamStore::ranks_of_other(const ShardedParam& other) const {
  if (!options_.ranks_of || other.rule == "dense") return options_.everyone;
  ParamSpec spec{other.tensor(), other.name(), 0, 0};
  spec.rule = other.rule;
  return options_.ranks_of(spec);
}

// Ranks on CPUs share the host's memory.
bool ParamStore::in_shared_memory() const {
  return !offloaded_ || (options_.placements.lp.rest == storage::Medium::kHost && device_.is_cpu());
}

// One piece of memory for the shards of all spaces of the same ranks, and one for their parameters that are not
// trained; or a plane elsewhere for each space.
void ParamStore::allocate_shards() {
  const Placements& placements = options_.placements;
  if (placements.moves_params()) {
    int64_t largest = 0;
    for (const ShardedParamPtr& param : sharded_params()) largest = std::max(largest, param->slice_numel());
    largest = (largest + options_.align - 1) / options_.align * options_.align;
    offloaded_ = std::make_unique<OffloadedParams>(storage_, placements.lp, options_.param_offload, largest);
  }
  for (const ShardedGroup& group : sharded_groups()) {
    if (!group.trained) {
      allocate_others(group);
      continue;
    }
    int64_t total = 0;
    std::vector<std::pair<ParamSpace*, int64_t>> starts;
    for (ParamSpace& space : spaces_) {
      if (!same_ranks(space.ranks().shard, group.ranks.shard)) continue;
      space.lp.numel = space.map.shard_numel;
      starts.emplace_back(&space, total);
      total += aligned(space.lp.bytes());
    }
    const at::Tensor region = in_shared_memory() ? options_.allocate(total, device_, group.ranks.shard) : at::Tensor();
    for (const auto& [space, start] : starts) {
      at::Tensor memory;
      if (region.defined()) memory = region.narrow(0, start, space->lp.bytes()).view(space->key.dtype);
      if (offloaded_) {
        std::vector<OffloadedParams::Slice> slices;
        for (size_t i = 0; i < space->params.size(); ++i)
          if (const size_t first = space->map.first[i]; first != space->map.first[i + 1])
            slices.push_back({specs_[space->params[i]].sharded.get(), space->map.extents[first].shard_offset});
        sort(slices, [](const auto& a, const auto& b) { return a.begin < b.begin; });
        space->lp.plane = offloaded_->add("parameters", slices, space->lp.numel, space->lp.dtype, memory);
        continue;
      }
      space->lp.data = memory;
      space->lp.plane = add_plane(*space, "parameters", space->lp, {}, {memory});
    }
  }
}

void ParamStore::allocate_others(const ShardedGroup& group) {
  int64_t total = 0;
  for (const ShardedParamPtr& other : group.params) total += aligned(other->resting_bytes());
  const at::Tensor region = in_shared_memory() ? options_.allocate(total, device_, group.ranks.shard) : at::Tensor();
  int64_t begin = 0;
  for (const ShardedParamPtr& other : group.params) {
    const int64_t bytes = other->resting_bytes();
    const at::Tensor memory =
        region.defined() ? region.narrow(0, begin, bytes).view(other->resting_type()) : at::Tensor();
    begin += aligned(bytes);
    if (!offloaded_) {
      other->move_shard(memory);
    } else if (bytes > 0) {
      offloaded_->add_alone("frozen parameter", *other, memory);
    }
  }
}

void ParamStore::rehome_others() {
  for (const ShardedGroup& group : sharded_groups())
    if (!group.trained) allocate_others(group);
}

std::vector<ShardedParamPtr> ParamStore::sharded_params() const {
  std::vector<ShardedParamPtr> result;
  for (const ParamSpec& spec : specs_)
    if (spec.sharded) result.push_back(spec.sharded);
  append(result, others_);
  return result;
}

std::vector<ShardedGroup> ParamStore::sharded_groups() const {
  std::vector<ShardedGroup> groups = {{options_.everyone, {}}};
  const auto add = [&](const SpaceRanks& ranks, const ShardedParamPtr& param, bool trained) {
    const auto same = [&](const ShardedGroup& group) {
      return group.trained == trained && same_ranks(group.ranks.shard, ranks.shard);
    };
    auto found = find_if(groups, same);
    if (found == groups.end()) found = groups.insert(found, {ranks, {}, trained});
    found->params.push_back(param);
  };
  for (const ParamSpace& space : spaces_)
    for (int32_t param : space.params) add(space.ranks(), specs_[param].sharded, true);
  for (const ShardedParamPtr& other : others_) add(ranks_of_other(*other), other, false);
  return groups;
}

void ParamStore::release() {
  at::NoGradGuard no_grad;
  for (ParamSpec& spec : specs_) {
    if (spec.sharded) continue;
    spec.tensor.set_data(spec.tensor.detach().clone());
    spec.home = at::Tensor();
  }
  for (const ShardedParamPtr& param : sharded_params())
    if (!param->offloaded()) param->leave_memory();
  // Files go now, whoever still holds this object.
  const auto drop_file = [&](Buffer& buffer) {
    if (buffer.exists() && storage_->placement(buffer.plane).in_files()) drop(buffer);
  };
  for (ParamSpace& space : spaces_) {
    drop_file(space.grad);
    for (Buffer& slot : space.slots) drop_file(slot);
    if (space.has_masters()) drop_file(space.master);
  }
  state_folder_.reset();
}

ParamStore::~ParamStore() {
  if (!offloaded_) return;
  try {
    for (ParamSpace& space : spaces_) {
      for (Buffer& slot : space.slots) drop(slot);
      if (!space.local.is(space.grad)) drop(space.local);
      drop(space.grad);
      if (space.has_masters()) drop(space.master);
    }
    storage_->trim();
  } catch (const std::exception&) {  // a storage that has lost a plane has nothing to free
  }
}

}  // namespace ds::zero
