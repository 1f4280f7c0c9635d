#include "storage/shard_storage.h"

#include <ATen/ops/from_blob.h>

#include <utility>

#include "storage/storage_state.h"

namespace ds::storage {

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this == &other) return *this;
  release();
  state_ = std::move(other.state_);
  data_ = std::move(other.data_);
  pieces_ = std::move(other.pieces_);
  staging_ = std::move(other.staging_);
  plane_ = std::move(other.plane_);
  first_ = other.first_;
  end_ = other.end_;
  access_ = other.access_;
  return *this;
}

void Lease::release() noexcept {
  if (!state_) return;
  const std::shared_ptr<StorageState> state = std::move(state_);
  if (state->owner.here()) return state->leases.release(*this);
  data_.reset();
  pieces_.clear();
  staging_.reset();
  plane_.reset();
}

at::Tensor as_tensor(Lease lease) {
  const at::Tensor data = lease.data();
  auto held = std::make_shared<Lease>(std::move(lease));
  return at::for_blob(data.data_ptr(), data.sizes())
      .deleter([held](void*) { held->release(); })
      .options(data.options())
      .target_device(data.device())  // not every device can tell whose an address is
      .make_tensor();
}

ShardStorage::ShardStorage(c10::Device device, Budget budget, FileAccess files) {
  if (!files.files) files.files = std::make_shared<io::Files>();
  state_ = std::make_shared<StorageState>(device, budget, files);
}
ShardStorage::~ShardStorage() { state_->close(); }

PlaneId ShardStorage::add(std::string name, int64_t numel, at::ScalarType type, const Placement& placement, Cuts cuts,
                          const at::Tensor& memory) {
  return add(std::move(name), numel, type, placement, std::move(cuts), PlaneExtras{memory});
}
PlaneId ShardStorage::add(std::string name, int64_t numel, at::ScalarType type, const Placement& placement, Cuts cuts,
                          const PlaneExtras& extras) {
  return {state_->planes.add(std::move(name), numel, type, placement, cuts, extras)};
}
void ShardStorage::remove(PlaneId plane) { state_->remove(plane.number); }
void ShardStorage::discard(PlaneId plane, plan::Range range) { state_->discard(plane.number, range); }
bool ShardStorage::occupy(PlaneId plane, plan::Range range) { return state_->occupy(plane.number, range); }
void ShardStorage::move(const std::vector<PlaneId>& planes, const Placement& placement, bool wait_each) {
  std::vector<int32_t> numbers;
  for (const PlaneId plane : planes) numbers.push_back(plane.number);
  state_->move(std::move(numbers), placement, wait_each);
}

// ---- leases -------------------------------------------------------------------------------------------------------

Lease ShardStorage::acquire(PlaneId plane, plan::Range range, Access access, Medium at) {
  Lease lease = state_->leases.acquire(plane.number, range, access, at);
  lease.state_ = state_;
  return lease;
}
Lease ShardStorage::scratch(int64_t numel, at::ScalarType type, Medium at, ScratchUser user) {
  Lease lease = state_->leases.scratch(numel, type, at, user.number);
  lease.state_ = state_;
  return lease;
}
void ShardStorage::prefetch(PlaneId plane, plan::Range range, Medium at) {
  state_->prefetches.prefetch(plane.number, range, at);
}
bool ShardStorage::here(PlaneId plane, plan::Range range, Medium at) const {
  return state_->prefetches.here(plane.number, range, at);
}

// ---- planes -------------------------------------------------------------------------------------------------------

std::optional<Medium> ShardStorage::resting(PlaneId plane, plan::Range range) const {
  const auto lock = state_->lock.hold();
  const PlanePtr found = state_->planes.find(plane.number);
  const auto [first, end] = found->blocks_of(range);
  const PlanePart& part = found->part_of(first);
  const bool whole =
      found->apart ? found->in_memory(first, end, part.medium) : part.memory.defined() && end <= part.end;
  return whole ? std::optional<Medium>(part.medium) : std::nullopt;
}
bool ShardStorage::has_memory(PlaneId plane, plan::Range range) const {
  const auto lock = state_->lock.hold();
  const PlanePtr found = state_->planes.find(plane.number);
  const auto [first, end] = found->blocks_of(range);
  for (int32_t b = first; b < end; ++b)
    if (found->absent(b)) return false;
  return true;
}
at::Tensor ShardStorage::resident(PlaneId plane) {
  auto lock = state_->lock.hold();
  return state_->planes.resident(lock, plane.number, {0, state_->planes.find(plane.number)->numel});
}
at::Tensor ShardStorage::resident(PlaneId plane, plan::Range range) {
  auto lock = state_->lock.hold();
  return state_->planes.resident(lock, plane.number, range);
}
Placement ShardStorage::placement(PlaneId plane) const {
  const auto lock = state_->lock.hold();
  return state_->planes.find(plane.number)->placement;
}
std::vector<at::Tensor> ShardStorage::memory(PlaneId plane) const {
  const auto lock = state_->lock.hold();
  std::vector<at::Tensor> found;
  for (const PlanePart& part : state_->planes.find(plane.number)->parts)
    if (part.memory.defined()) found.push_back(part.memory);
  return found;
}

// ---- memory -------------------------------------------------------------------------------------------------------

bool ShardStorage::has_room(Medium at, int64_t bytes) const { return state_->memory.has_room(at, bytes); }
void ShardStorage::limit(Medium medium, int64_t bytes) { state_->memory.limit(medium, bytes); }
ScratchUser ShardStorage::add_scratch_user(Reuse reuse) { return state_->memory.add_scratch_user(reuse); }
void ShardStorage::limit_scratch(Medium at, int64_t bytes, ScratchUser user) {
  state_->memory.limit_scratch(at, bytes, user.number);
}
void ShardStorage::keep_scratch(Medium at, int64_t bytes, ScratchUser user) {
  state_->memory.keep_scratch(at, bytes, user.number);
}
ScratchUsage ShardStorage::scratch_usage(Medium at, ScratchUser user) const {
  return state_->memory.scratch_usage(at, user.number);
}
void ShardStorage::trim(ScratchUser user) { state_->memory.trim(user.number); }
void ShardStorage::trim() { state_->memory.trim(-1); }
void ShardStorage::settle() { state_->background.settle(); }
void ShardStorage::at_exit() noexcept {
  for (const auto& tier : state_->tiers) tier->at_exit();
}
Usage ShardStorage::usage() const { return state_->memory.usage(); }
void ShardStorage::record_copies(bool on) { state_->memory.record_copies(on); }
std::vector<CopyRecord> ShardStorage::take_copies() { return state_->memory.take_copies(); }
const StepClockPtr& ShardStorage::clock() const { return state_->memory.step_clock(); }
c10::Device ShardStorage::device() const { return state_->device; }

}  // namespace ds::storage
