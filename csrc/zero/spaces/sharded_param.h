// A parameter of which every rank holds one slice (ZeRO stage 3).
//
// The tensor object is the user's and stays the same; its data is the whole parameter while it is gathered and empty
// while it is not. A gathered buffer is fresh memory each time unless nobody else refers to the old one: autograd may
// have saved a view of it for backward, and that view must keep its values. Elements lie in logical order, whatever the
// memory format the parameter had: slices are what other tools read.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "zero/offload/slice_home.h"
#include "zero/spaces/slice_lease.h"

namespace ds::zero {

// Number of times that a tensor was written in place; 0 for one made in inference mode, where nobody counts.
uint32_t version_of(const at::Tensor& tensor);

// Values of a parameter that are gathered: those that modules compute with, or those of the slices. They have different
// sources where the engine keeps copies of the slices, and differ where these are codes.
enum class Values { kUsed, kExact };

// Bytes that gathers read instead of the slice (gathers/slice_copies.h).
struct SliceCopies {
  SliceCodecPtr codec;  // null: elements travel as they are
  at::Tensor codes;     // of this rank's slice
  // A second copy inside a group of ranks (hpZ): `slices` rows of what travels, one behind the other, of the ranks that
  // have this rank's place in each group. Undefined: there is none.
  at::Tensor second;
  int64_t slices = 1;

  bool any() const { return codec != nullptr || second.defined(); }
};

enum class ParamStatus { kAvailable = 1, kNotAvailable = 2, kInflight = 3 };

class ShardedParam {
 public:
  // `tensor` holds the whole parameter, and goes on doing so until release(). Fails for what is not a dense leaf.
  ShardedParam(const at::Tensor& tensor, std::string name, int64_t parts, int64_t rank);
  // A copy with a slice of its own; `tensor` is an empty leaf that stands for it, not available.
  ShardedParam(const at::Tensor& tensor, const ShardedParam& other);
  ~ShardedParam();  // a file of its slice goes
  ShardedParam(const ShardedParam&) = delete;
  ShardedParam& operator=(const ShardedParam&) = delete;

  // The user's tensor; undefined when nobody holds it any more. Not held here: it holds this object in its turn, as an
  // attribute of Python's, and a circle through C++ never ends.
  at::Tensor tensor() const { return at::Tensor(tensor_.lock()); }
  const std::string& name() const { return name_; }
  void rename(std::string name) { name_ = std::move(name); }
  const std::vector<int64_t>& sizes() const { return sizes_; }
  const std::vector<int64_t>& strides() const { return strides_; }
  int64_t numel() const { return numel_; }
  int64_t parts() const { return parts_; }
  int64_t rank() const { return rank_; }
  int64_t slice_numel() const { return slice_; }
  at::ScalarType dtype() const { return dtype_; }
  const c10::Device& device() const { return device_; }  // the device on which it is gathered
  int64_t padded_numel() const { return slice_ * parts_; }
  // Elements of this rank's slice that are not padding, and where they start within the parameter.
  int64_t own_begin() const { return std::min(rank_ * slice_, numel_); }
  int64_t own_numel() const { return std::min(slice_, numel_ - own_begin()); }

  // slice_numel() elements, padding zero, where they rest in memory of their own on the device; else undefined.
  at::Tensor shard() const { return codec_ ? at::Tensor() : shard_; }
  // The same wherever they rest, and in whatever form.
  SliceLease slice(storage::Access access) const;
  // The slice rests as codes from now on: decoded values are its values. Frozen parameters only.
  void rest_as_codes(const SliceCodecPtr& codec);
  bool rests_as_codes() const { return codec_ != nullptr; }
  // The form that rests: elements, or bytes of codes.
  at::ScalarType resting_type() const { return codec_ ? at::kByte : dtype_; }
  int64_t resting_numel() const { return codec_ ? codec_->row_bytes(slice_) : slice_; }
  int64_t resting_bytes() const { return resting_numel() * static_cast<int64_t>(c10::elementSize(resting_type())); }

  // The row that this rank sends in gathers of such values: its slice, or the slices of its second copy, each as
  // elements or as codes.
  Values resolved(Values values) const { return copies.any() ? values : Values::kUsed; }
  const SliceCodec* row_codec(Values values) const;  // null: elements
  int64_t row_slices(Values values) const { return reads_second(values) ? copies.slices : 1; }
  int64_t row_bytes(Values values) const;
  SliceLease row(Values values) const;
  SliceLease own_row(Values values) const;  // of the slice alone
  // It is fetched first.
  bool row_elsewhere(Values values) const { return offloaded() && !reads_second(values) && !reads_codes(values); }
  SliceCopies copies;
  at::Tensor second_values() const;  // the elements of this rank's part of the second copy; undefined without one

  bool offloaded() const { return home_.storage != nullptr; }
  bool in_file() const { return offloaded() && !home_.storage->resting(home_.plane, home_.range); }
  void prefetch() const;                                      // a hint: slice() comes next
  bool here() const { return !offloaded() || home_.here(); }  // slice() would not wait for a transfer
  void move_shard(const at::Tensor& home);  // copies the slice to `home`, which is the shard from now on
  void move_shard(const SliceHome& home);   // the same to a plane
  void leave_memory();                      // of an engine, for its own; copies go
  // The slice as a tensor that outlives leases: its memory where it rests in memory, else a copy. `values` of such a
  // copy, changed, are kept by set_slice(). Nobody but the user writes to it.
  at::Tensor slice_tensor() const;
  void set_slice(const at::Tensor& values);
  // The user has written to the slice since know_slice().
  bool slice_written() const { return slice_set_ || version_of(handed_) != handed_version_; }
  void know_slice();
  void note_slice_written() { slice_set_ = true; }
  void cast(at::ScalarType type);  // of a parameter that is not available

  ParamStatus status() const { return status_; }
  bool available() const { return status_ == ParamStatus::kAvailable; }
  void mark_inflight();
  void mark_absent();  // the transfer has been given up

  // The parameter becomes the first numel() elements of `buffer`, which has padded_numel().
  void take_full(const at::Tensor& buffer, Values values = Values::kUsed);
  void note_values(Values values) { shown_ = resolved(values); }  // of the buffer, which has been written
  // It is available, and computing with it is computing with such values. Exact ones serve all.
  bool shows(Values values) const { return available() && (shown_ == Values::kExact || shown_ == resolved(values)); }
  bool shows_decoded() const { return available() && copies.codec && shown_ == Values::kUsed; }
  void forget_values() { shown_.reset(); }  // it shows none, and the next gather brings some
  // The values go; the shard stays.
  void release();
  const at::Tensor& buffer() const { return buffer_; }  // of take_full(), undefined when there is none
  // The buffer is the slice, which has all elements: what is written into the parameter is in the slice at once.
  bool is_own_slice() const { return buffer_.defined() && buffer_.is_same(shard_); }
  // The slice takes this rank's part of the gathered values. Returns whether it had others; where the buffer is the
  // slice, whether torch has counted a write.
  bool write_back();
  // The gathered values in memory order, numel() elements; undefined while not available.
  at::Tensor gathered() const;

  // A write of the user into the gathered values, outside of GatheredParameters with a modifier_rank, counts as in a
  // process without an engine: such a parameter is not released before the slices have taken it (UserWrites).
  // written(): in place, or by another tensor as param.data. `data_given`: param.data was handed out, and writes to
  // that are not counted, so that whoever releases the parameter compares it with the slices; `kept`: it found another
  // value.
  bool written() const;
  void know_values();
  bool own_part_differs() const;  // from the slice
  // The gathered values are others than the slice, because of the user.
  bool user_wrote() const;
  double checksum() const;  // of the gathered values: not 0
  bool data_given = false, kept = false;

  // Runs `body` while the tensor has its whole shape, without the values: autograd remembers the shape of a parameter
  // from when it first sees it.
  void with_shape_only(const std::function<void()>& body);

  // Another shape or dtype: the whole parameter has been replaced while gathered (embedding resize).
  bool reshaped() const;
  void adopt_shape();

  int64_t id = -1;             // a number of this process; names its file
  std::string rule = "dense";  // of one that is not trained: which ranks it is spread over, see space_rules/
  // Number of users that need it gathered: module calls, contexts, persistence. The last one releases it.
  int holders = 0;
  int exact_holders = 0;  // those of them that want the values of the slices
  bool persistent = false;
  std::function<void(ParamStatus)> on_status;  // called after each change
  // Holds the resources of on_status as long as the result lives: for changes of several parameters together.
  std::function<std::shared_ptr<void>()> hold_for_status;

 private:
  void set_status(ParamStatus status);
  at::TensorOptions options() const;
  void leave_home();
  bool reads_codes(Values values) const { return copies.codec && values == Values::kUsed; }
  bool reads_second(Values values) const { return copies.second.defined() && values == Values::kUsed; }
  SliceLease stored(storage::Access access) const;  // as it rests
  at::Tensor own_values() const;                    // own_numel() elements: this rank's part of what was gathered
  void set_data(const at::Tensor& data) const;
  void set_nothing();
  bool replaced() const;

  c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl> tensor_;
  std::string name_;
  std::vector<int64_t> sizes_, strides_;
  int64_t numel_, parts_, rank_, slice_;
  at::ScalarType dtype_ = at::kFloat;
  c10::Device device_ = c10::kCPU;
  SliceCodecPtr codec_;  // of what rests; null: elements
  at::Tensor shard_;
  SliceHome home_;
  at::Tensor buffer_;
  at::Tensor view_, viewed_;  // of take_full(): the parameter's data in the buffer `viewed_`
  at::Tensor nothing_;        // its data while it is not available
  ParamStatus status_ = ParamStatus::kAvailable;
  uint32_t known_version_ = 0;  // of the tensor
  mutable at::Tensor handed_;   // slice_tensor() that lasts
  mutable uint32_t handed_version_ = 0;
  bool slice_set_ = false;
  std::optional<Values> shown_ = Values::kExact;  // in the buffer
};
using ShardedParamPtr = std::shared_ptr<ShardedParam>;

// While it lives, the statuses of several parameters change at the price of one. `any`: one of them.
class StatusScope {
 public:
  explicit StatusScope(const ShardedParam& any) : held_(any.hold_for_status ? any.hold_for_status() : nullptr) {}

 private:
  std::shared_ptr<void> held_;
};

}  // namespace ds::zero
