// Part of a buffer, leased where a kernel works on it.
#pragma once
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "zero/spaces/param_space.h"

namespace ds::zero {

// This rank's row of one bucket, or (bucket -1) the whole buffer.
inline plan::Range part_of(const ParamSpace& space, const Buffer& buffer, int32_t bucket) {
  return bucket < 0 ? plan::Range{0, buffer.numel} : space.row_in(buffer, space.map.buckets[bucket]);
}

// Behind the last element of the bucket that this rank owns; padding follows.
inline int64_t last_owned(const ParamSpace& space, int32_t bucket) {
  int64_t end = space.map.buckets[bucket].shard_begin;
  for (size_t e : space.owned) {
    const plan::Extent& extent = space.map.extents[e];
    if (space.map.bucket_of[extent.param] == bucket) end = std::max(end, extent.shard_offset + extent.numel);
  }
  return end;
}

class LeasedRow {
 public:
  LeasedRow() = default;
  LeasedRow(storage::ShardStorage& storage, const ParamSpace& space, const Buffer& buffer, int32_t bucket,
            storage::Access access, storage::Medium at)
      : space_(&space),
        buffer_(&buffer),
        begin_(part_of(space, buffer, bucket).begin),
        lease_(storage.acquire(buffer.plane, part_of(space, buffer, bucket), access, at)) {}

  // Memory that is laid out as that part of `like`.
  LeasedRow(const ParamSpace& space, const Buffer& like, int32_t bucket, storage::Lease row)
      : space_(&space), buffer_(&like), begin_(part_of(space, like, bucket).begin), lease_(std::move(row)) {}

  explicit operator bool() const { return static_cast<bool>(lease_); }
  at::ScalarType dtype() const { return buffer_->dtype; }
  // All of the row; undefined where it lies in pieces, of several buckets.
  const at::Tensor& data() const { return lease_.data(); }
  // The address of an element of the shard space that lies in the row.
  void* address(int32_t bucket, int64_t shard_offset) const {
    const auto [memory, offset] = place_of(bucket, shard_offset);
    return static_cast<char*>(memory.data_ptr()) + offset * static_cast<int64_t>(memory.element_size());
  }
  at::Tensor narrow(int32_t bucket, int64_t shard_begin, int64_t shard_end) const {
    const auto [memory, offset] = place_of(bucket, shard_begin);
    return memory.narrow(0, offset, shard_end - shard_begin);
  }

 private:
  // The piece of the row that has the element, and where in it.
  std::pair<const at::Tensor&, int64_t> place_of(int32_t bucket, int64_t shard_offset) const {
    const int64_t offset = space_->offset_in(*buffer_, space_->map.buckets[bucket], shard_offset) - begin_;
    if (data().defined()) return {data(), offset};
    for (const storage::Lease::Piece& piece : lease_.pieces())
      if (offset >= piece.begin && offset < piece.begin + piece.data.numel()) return {piece.data, offset - piece.begin};
    fail(ErrorKind::kRuntime, "element ", offset, " of a leased row is in no memory: its bucket has been given back");
  }

  const ParamSpace* space_ = nullptr;
  const Buffer* buffer_ = nullptr;
  int64_t begin_ = 0;
  storage::Lease lease_;
};

}  // namespace ds::zero
