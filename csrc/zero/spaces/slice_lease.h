// A slice of a parameter for as long as somebody works with it.
#pragma once
#include <ATen/core/Tensor.h>

#include <utility>

#include "storage/shard_storage.h"
#include "zero/spaces/slice_codec.h"

namespace ds::zero {

class SliceLease {
 public:
  explicit SliceLease(at::Tensor resting) : data_(std::move(resting)) {}
  SliceLease(storage::Lease lease, int64_t numel)
      : lease_(std::move(lease)), data_(lease_.data().narrow(0, 0, numel)) {}
  // Elements of codes that rest: `row` is their lease, and `elements` get the decoded values. `keep`: elements are
  // coded again at the end.
  SliceLease(SliceLease&& row, at::Tensor elements, SliceCodecPtr codec, bool keep)
      : lease_(std::move(row.lease_)),
        row_(std::move(row.data_)),
        data_(std::move(elements)),
        codec_(keep ? codec : nullptr) {
    codec->decode({pair()});
  }
  SliceLease(SliceLease&&) = default;
  ~SliceLease() {
    if (!codec_ || !data_.defined()) return;
    try {
      codec_->encode({pair()});
    } catch (const std::exception&) {  // kernels failed before this; the owner of the codec has been told
    }
  }

  const at::Tensor& data() const { return data_; }

 private:
  SliceCodec::Pair pair() const { return SliceCodec::pair(data_, row_); }

  storage::Lease lease_;
  at::Tensor row_, data_;
  SliceCodecPtr codec_;
};

}  // namespace ds::zero
