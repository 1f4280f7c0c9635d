#include "zero/spaces/offloaded_params.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "zero/offload/param_files.h"

namespace ds::zero {

using storage::Medium;

namespace {

bool in_files(const storage::Placement& placement) {
  return placement.rest == Medium::kFile || placement.work == Medium::kFile;
}

}  // namespace

OffloadedParams::OffloadedParams(std::shared_ptr<storage::ShardStorage> storage, const storage::Placement& placement,
                                 const ParamOffload& options, int64_t largest)
    : storage_(std::move(storage)),
      placement_(placement),
      options_(options),
      largest_(largest),
      host_left_(options.host_numel) {
  if (!in_files(placement_)) return;
  folder_ = param_folders(placement_.folder, options_.rank);
  copies_ = storage_->add_scratch_user();
}

// As many of the first blocks as there is room for rest on the host.
storage::Placement OffloadedParams::placement_for(const storage::Cuts& ends) {
  storage::Placement placement = placement_;
  if (!in_files(placement) || ends.empty()) return placement;
  int64_t fitting = 0;
  for (const int64_t end : ends)
    if (end <= host_left_) fitting = end;
  host_left_ -= fitting;
  placement.rest = Medium::kHost;
  placement.work = Medium::kFile;
  placement.host_share = static_cast<double>(fitting) / static_cast<double>(ends.back());
  return placement;
}

storage::PlaneId OffloadedParams::add(const char* name, const std::vector<Slice>& slices, int64_t numel,
                                      at::ScalarType type, const at::Tensor& memory) {
  return add(name, slices, numel, type, memory, /*alone=*/false);
}

void OffloadedParams::add_alone(const char* name, ShardedParam& param, const at::Tensor& memory) {
  add(name, {{&param, 0}}, param.resting_numel(), param.resting_type(), memory, /*alone=*/true);
}

storage::PlaneId OffloadedParams::add(const char* name, const std::vector<Slice>& slices, int64_t numel,
                                      at::ScalarType type, const at::Tensor& memory, bool alone) {
  storage::Cuts ends;
  storage::PlaneExtras extras;
  extras.memory = memory;
  extras.folder = folder_;
  extras.copies = copies_;
  for (size_t i = 0; i < slices.size(); ++i) {
    ends.push_back(i + 1 < slices.size() ? slices[i + 1].begin : numel);
    if (folder_)
      extras.block_files.push_back(param_file(type, options_.rank, slices[i].param->id, slices[i].param->name()));
  }
  const storage::Placement placement = placement_for(ends);
  int64_t largest = 0;  // of those in files
  const ShardedParam* widest = nullptr;
  for (size_t i = 0; folder_ && i < slices.size(); ++i) {
    const int64_t room = ends[i] - slices[i].begin;
    if (static_cast<double>(ends[i]) <= placement.host_share * static_cast<double>(numel) + 0.5 || room <= largest)
      continue;
    widest = slices[i].param;
    largest = room;
  }
  if (largest > options_.buffer_numel)
    fail(ErrorKind::kValue, "zero_optimization.offload_param.buffer_size is ", options_.buffer_numel,
         " elements, and this rank's slice of parameter '", widest->name(), "' needs ", largest,
         ": set it to at least ", std::max(largest, largest_));
  if (folder_ && options_.limited()) {
    constexpr int64_t kAlign = 4096;  // a copy begins and ends at multiples of it
    const int64_t bytes = options_.buffer_numel * static_cast<int64_t>(c10::elementSize(type));
    const int64_t one = (bytes + kAlign - 1) / kAlign * kAlign + kAlign;
    limit_ = std::max(limit_, options_.buffers > INT64_MAX / 4 / one ? INT64_MAX / 4 : options_.buffers * one);
    storage_->limit_scratch(Medium::kHost, limit_, copies_);
  }
  const storage::PlaneId plane = storage_->add(name, numel, type, placement, ends, extras);
  for (size_t i = 0; i < slices.size(); ++i)
    slices[i].param->move_shard(SliceHome{storage_, plane, {slices[i].begin, ends[i]}, alone});
  return plane;
}

}  // namespace ds::zero
