#include "storage/tensor_store.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "base/blocking_region.h"
#include "base/error.h"
#include "base/sizes.h"
#include "storage/alignment.h"

namespace ds::storage {

namespace {
constexpr int64_t kMostBlocksOfFile = 64;

Budget buffers() {
  Budget made;
  made.scratch = "buffers";
  return made;
}

}  // namespace

TensorStore::TensorStore(c10::Device device, Placement placement, FileAccess files, int at_once)
    : placement_(std::move(placement)),
      at_once_(at_once),
      storage_(std::make_shared<ShardStorage>(device, buffers(), std::move(files))) {
  if (at_once < 1) fail(ErrorKind::kValue, "A store moves at least one tensor at a time, got ", at_once, ".");
}

TensorStore::Block TensorStore::block_for(int64_t bytes) {
  Blocks& of_size = blocks_[bytes];
  if (of_size.free.empty()) {
    // Memory one by one; files, which are opened, for as many as there are already.
    const int64_t more =
        placement_.rest == Medium::kFile ? std::clamp<int64_t>(of_size.count, 1, kMostBlocksOfFile) : 1;
    Cuts cuts;
    const int64_t all = sizes::product("bytes of waiting tensors", more, bytes);
    for (int64_t block = 1; block <= more; ++block) cuts.push_back(block * bytes);
    const std::string name = "waiting_" + std::to_string(bytes) + "_" + std::to_string(of_size.count);
    const PlaneId plane = storage_->add(name, all, at::kByte, placement_, cuts);
    for (int64_t block = more; block-- > 0;) of_size.free.push_back({plane, {block * bytes, (block + 1) * bytes}});
    of_size.count += more;
  }
  const Block found = of_size.free.back();
  of_size.free.pop_back();
  return found;
}

// Limits the device memory of copies on their way to a multiple of the largest tensor: a caller that puts faster than
// they leave waits for the oldest.
void TensorStore::make_room(int64_t bytes) {
  if (bytes <= largest_ || placement_.rest == Medium::kDevice) return;
  largest_ = bytes;
  storage_->limit(Medium::kDevice, room(largest_, at_once_));
}

void TensorStore::end_copies(int64_t most) {
  int64_t bytes = 0;
  for (const auto& [block, lease] : leaving_) bytes += copy_bytes(block.range.numel());
  for (; bytes > most && !leaving_.empty(); leaving_.pop_front())
    bytes -= copy_bytes(leaving_.front().first.range.numel());
}

int64_t TensorStore::put(const at::Tensor& tensor) {
  const int64_t bytes = static_cast<int64_t>(tensor.nbytes());
  Waiting made{{}, tensor.sizes().vec(), tensor.scalar_type(), bytes};
  if (bytes > 0) {
    {
      const auto guard = locked(lock_);
      make_room(bytes);
      made.block = block_for(bytes);
      end_copies(room(largest_, at_once_) - copy_bytes(bytes));
    }
    Lease lease = storage_->acquire(made.block.plane, made.block.range, Access::kWrite, Medium::kDevice);
    lease.data().view(made.type).view(made.sizes).copy_(tensor.detach());
    if (device().is_meta() && placement_.rest != Medium::kDevice) {
      const auto guard = locked(lock_);
      leaving_.emplace_back(made.block, std::move(lease));
    }
  }
  const auto guard = locked(lock_);
  waiting_.emplace(next_, std::move(made));
  return next_++;
}

// Finds a tensor that comes back, behind all tensors that are on their way.
TensorStore::Waiting TensorStore::find(int64_t number) {
  const auto guard = locked(lock_);
  end_copies(0);
  const auto found = waiting_.find(number);
  if (found == waiting_.end()) fail(ErrorKind::kValue, "No tensor ", number, " waits here: it has been dropped.");
  return found->second;
}

at::Tensor TensorStore::get(int64_t number) {
  const Waiting one = find(number);
  at::Tensor made = at::empty(one.sizes, at::TensorOptions().dtype(one.type).device(storage_->device()));
  if (one.bytes > 0) {
    const Lease lease = storage_->acquire(one.block.plane, one.block.range, Access::kRead, Medium::kDevice);
    made.copy_(lease.data().view(one.type).view(one.sizes));
  }
  return made;
}

void TensorStore::prefetch(int64_t number) {
  const Waiting one = find(number);
  if (one.bytes > 0) storage_->prefetch(one.block.plane, one.block.range, Medium::kDevice);
}

void TensorStore::drop(int64_t number) {
  const auto guard = locked(lock_);
  const auto found = waiting_.find(number);
  if (found == waiting_.end()) return;
  end_copies(0);  // its block is the next one's
  if (found->second.bytes > 0) blocks_[found->second.bytes].free.push_back(found->second.block);
  waiting_.erase(found);
}

int64_t TensorStore::waiting() const {
  const auto guard = locked(lock_);
  return static_cast<int64_t>(waiting_.size());
}

}  // namespace ds::storage
