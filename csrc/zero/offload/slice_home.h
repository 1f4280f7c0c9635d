// The home of a slice that does not rest on the computing device: whole blocks of a plane.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>

#include "storage/shard_storage.h"

namespace ds::zero {

struct SliceHome {
  std::shared_ptr<storage::ShardStorage> storage;  // null: there is none
  storage::PlaneId plane;
  plan::Range range;   // the slice, and padding behind it
  bool alone = false;  // the plane has nothing else

  // The medium at which its elements are leased: that in which they rest, so that nothing is copied before the slice
  // is; the host if they cannot be addressed there; the device if that is another one, which fetches them by itself.
  storage::Medium medium() const {
    if (!storage->device().is_cpu()) return storage::Medium::kDevice;
    return storage->resting(plane, range).value_or(storage::Medium::kHost);
  }
  storage::Lease lease(storage::Access access) const { return storage->acquire(plane, range, access, medium()); }
  void prefetch() const { storage->prefetch(plane, range, medium()); }
  bool here() const { return storage->here(plane, range, medium()); }
};

}  // namespace ds::zero
