#include "storage/shard_storage.h"

#include <ATen/ops/from_blob.h>

#include <utility>

#include "storage/storage_state.h"

namespace ds::storage {

Lease::Lease(Lease&& other) noexcept { *this = std::move(other); }

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this == &other) return *this;
  release();
  state_ = std::move(other.state_);
  data_ = std::move(other.data_);
  staging_ = std::move(other.staging_);
  plane_ = other.plane_;
  first_ = other.first_;
  end_ = other.end_;
  access_ = other.access_;
  return *this;
}

void Lease::release() noexcept {
  if (!state_) return;
  const std::shared_ptr<StorageState> state = std::move(state_);
  state->release(*this);
}

at::Tensor as_tensor(Lease lease) {
  const at::Tensor data = lease.data();
  auto held = std::make_shared<Lease>(std::move(lease));
  return at::from_blob(
      data.data_ptr(), data.sizes(), [held](void*) { held->release(); }, data.options());
}

ShardStorage::ShardStorage(c10::Device device, Budget budget, FileAccess files) {
  if (!files.files) files.files = std::make_shared<io::Files>();
  state_ = std::make_shared<StorageState>(device, std::move(budget), files);
}
ShardStorage::~ShardStorage() { state_->close(); }

PlaneId ShardStorage::add(std::string name, int64_t numel, at::ScalarType type, const Placement& placement, Cuts cuts,
                          const at::Tensor& memory) {
  return add(std::move(name), numel, type, placement, std::move(cuts), PlaneExtras{memory});
}
PlaneId ShardStorage::add(std::string name, int64_t numel, at::ScalarType type, const Placement& placement, Cuts cuts,
                          const PlaneExtras& extras) {
  return {state_->add(std::move(name), numel, type, placement, cuts, extras)};
}
void ShardStorage::remove(PlaneId plane) { state_->remove(plane.number); }
Lease ShardStorage::acquire(PlaneId plane, plan::Range range, Access access, Medium at) {
  return state_->acquire(plane.number, range, access, at);
}
void ShardStorage::discard(PlaneId plane, plan::Range range) { state_->discard(plane.number, range); }
void ShardStorage::prefetch(PlaneId plane, plan::Range range, Medium at) { state_->prefetch(plane.number, range, at); }
bool ShardStorage::here(PlaneId plane, plan::Range range, Medium at) const {
  return state_->here(plane.number, range, at);
}
std::optional<Medium> ShardStorage::resting(PlaneId plane, plan::Range range) const {
  return state_->resting(plane.number, range);
}
Lease ShardStorage::scratch(int64_t numel, at::ScalarType type, Medium at, ScratchUser user) {
  return state_->scratch(numel, type, at, user.number);
}
bool ShardStorage::has_room(Medium at, int64_t bytes) const { return state_->has_room(at, bytes); }
ScratchUser ShardStorage::add_scratch_user(bool keeps) { return {state_->add_scratch_user(keeps)}; }
void ShardStorage::limit_scratch(Medium at, int64_t bytes, ScratchUser user) {
  state_->limit_scratch(at, bytes, user.number);
}
void ShardStorage::keep_scratch(Medium at, int64_t bytes, ScratchUser user) {
  state_->keep_scratch(at, bytes, user.number);
}
ScratchUsage ShardStorage::scratch_usage(Medium at, ScratchUser user) const {
  return state_->scratch_usage(at, user.number);
}
void ShardStorage::trim(ScratchUser user) { state_->trim(user.number); }
void ShardStorage::trim() { state_->trim(-1); }
at::Tensor ShardStorage::resident(PlaneId plane) {
  return state_->resident(plane.number, state_->all_of(plane.number));
}
at::Tensor ShardStorage::resident(PlaneId plane, plan::Range range) { return state_->resident(plane.number, range); }
void ShardStorage::limit(Medium medium, int64_t bytes) { state_->limit(medium, bytes); }
void ShardStorage::at_exit() noexcept { state_->at_exit(); }
void ShardStorage::move(const std::vector<PlaneId>& planes, const Placement& placement, bool wait_each) {
  std::vector<int32_t> numbers;
  for (const PlaneId plane : planes) numbers.push_back(plane.number);
  state_->move(std::move(numbers), placement, wait_each);
}
Placement ShardStorage::placement(PlaneId plane) const { return state_->placement(plane.number); }
std::vector<at::Tensor> ShardStorage::memory(PlaneId plane) const { return state_->memory(plane.number); }
void ShardStorage::settle() { state_->settle(); }
Usage ShardStorage::usage() const { return state_->usage(); }
c10::Device ShardStorage::device() const { return state_->device(); }

}  // namespace ds::storage
