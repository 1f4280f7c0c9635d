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
#include <string>
#include <vector>

#include "zero/offload/slice_home.h"

namespace ds::zero {

// Number of times that a tensor was written in place; 0 for one made in inference mode, where nobody counts.
uint32_t version_of(const at::Tensor& tensor);

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
  int64_t slice_bytes() const { return slice_ * static_cast<int64_t>(c10::elementSize(dtype_)); }
  const c10::Device& device() const { return device_; }  // the device on which it is gathered
  int64_t padded_numel() const { return slice_ * parts_; }
  // Elements of this rank's slice that are not padding, and where they start within the parameter.
  int64_t own_begin() const { return std::min(rank_ * slice_, numel_); }
  int64_t own_numel() const { return std::min(slice_, numel_ - own_begin()); }

  // slice_numel() elements, padding zero, where they rest in memory of their own on the device; else undefined.
  const at::Tensor& shard() const { return shard_; }
  // The same wherever they rest.
  SliceLease slice(storage::Access access) const;
  bool offloaded() const { return home_.storage != nullptr; }
  bool in_file() const { return offloaded() && !home_.storage->resting(home_.plane, home_.range); }
  void prefetch() const;                                      // a hint: slice() comes next
  bool here() const { return !offloaded() || home_.here(); }  // slice() would not wait for a transfer
  void move_shard(const at::Tensor& home);  // copies the slice to `home`, which is the shard from now on
  void move_shard(const SliceHome& home);   // the same to a plane
  // The slice as a tensor that outlives leases: its memory where it rests in memory, else a copy. `values` of such a
  // copy, changed, are kept by set_slice(). Nobody but the user writes to it.
  at::Tensor slice_tensor() const;
  void set_slice(const at::Tensor& values);
  // The user has written to the slice since know_slice().
  bool slice_written() const { return slice_set_ || version_of(handed_) != handed_version_; }
  void know_slice();
  void cast(at::ScalarType type);  // of a parameter that is not available

  ParamStatus status() const { return status_; }
  bool available() const { return status_ == ParamStatus::kAvailable; }
  void mark_inflight();
  void mark_absent();  // the transfer has been given up

  // The parameter becomes the first numel() elements of `buffer`, which has padded_numel().
  void take_full(const at::Tensor& buffer);
  // The values go; the shard stays.
  void release();
  const at::Tensor& buffer() const { return buffer_; }  // of take_full(), undefined when there is none
  // The slice takes this rank's part of the gathered values; whether it had others.
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
  double checksum() const;        // of the gathered values: not 0
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
  bool persistent = false;
  std::function<void(ParamStatus)> on_status;  // called after each change
  // Holds the resources of on_status as long as the result lives: for changes of several parameters together.
  std::function<std::shared_ptr<void>()> hold_for_status;

 private:
  void set_status(ParamStatus status);
  at::TensorOptions options() const;
  void leave_home();
  void set_data(const at::Tensor& data) const;

  c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl> tensor_;
  std::string name_;
  std::vector<int64_t> sizes_, strides_;
  int64_t numel_, parts_, rank_, slice_;
  at::ScalarType dtype_ = at::kFloat;
  c10::Device device_ = c10::kCPU;
  at::Tensor shard_;
  SliceHome home_;
  at::Tensor buffer_;
  ParamStatus status_ = ParamStatus::kAvailable;
  uint32_t known_version_ = 0;  // of the tensor
  mutable at::Tensor handed_;   // slice_tensor() that lasts
  mutable uint32_t handed_version_ = 0;
  bool slice_set_ = false;
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
