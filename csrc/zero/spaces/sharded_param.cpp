#include "zero/spaces/sharded_param.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "plan/shard_map.h"

namespace ds::zero {

uint32_t version_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return 0;
  const c10::VariableVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
  return version.enabled() ? static_cast<uint32_t>(version.current_version()) : 0;
}

ShardedParam::ShardedParam(const at::Tensor& tensor, std::string name, int64_t parts, int64_t rank)
    : tensor_(tensor.getIntrusivePtr()), name_(std::move(name)), parts_(parts), rank_(rank) {
  if (!tensor.is_leaf())
    fail(ErrorKind::kValue, "parameter '", name_, "' is not a leaf tensor and cannot be partitioned");
  adopt_shape();
}

ShardedParam::ShardedParam(const at::Tensor& tensor, const ShardedParam& other)
    : tensor_(tensor.getIntrusivePtr()),
      name_(other.name_),
      sizes_(other.sizes_),
      strides_(other.strides_),
      numel_(other.numel_),
      parts_(other.parts_),
      rank_(other.rank_),
      slice_(other.slice_),
      dtype_(other.dtype_),
      device_(other.device_),
      shard_(other.slice(storage::Access::kRead).data().to(device_, /*non_blocking=*/false, /*copy=*/true)),
      status_(ParamStatus::kNotAvailable) {}

void ShardedParam::cast(at::ScalarType type) {
  at::NoGradGuard no_grad;
  if (available()) fail(ErrorKind::kRuntime, "parameter '", name_, "' is gathered and cannot change its dtype");
  if (type == dtype_) return;
  // An offloaded slice waits in memory until an engine gives it another placement.
  shard_ = slice(storage::Access::kRead).data().to(device_, type);
  leave_home();
  codec_ = nullptr;
  dtype_ = type;
  set_nothing();
}

void ShardedParam::adopt_shape() {
  at::NoGradGuard no_grad;
  const at::Tensor tensor = this->tensor();
  sizes_ = tensor.sizes().vec();
  strides_ = at::empty(sizes_, at::TensorOptions().device(at::kMeta)).strides().vec();
  numel_ = tensor.numel();
  slice_ = plan::slice_numel(numel_, parts_);
  leave_home();
  codec_ = nullptr;
  copies = {};
  dtype_ = tensor.scalar_type();
  device_ = tensor.device();
  shard_ = at::zeros({slice_}, options());
  buffer_ = view_ = viewed_ = nothing_ = at::Tensor();
  write_back();
}

bool ShardedParam::reshaped() const {
  const at::Tensor tensor = this->tensor();
  return available() && tensor.defined() &&
         (tensor.sizes() != at::IntArrayRef(sizes_) || tensor.scalar_type() != dtype_);
}

void ShardedParam::set_status(ParamStatus status) {
  if (status == status_) return;
  status_ = status;
  if (on_status) on_status(status);
}

// Modes of Python do not see it: torch compares the two tensors by an operator, and a parameter whose values are not
// here gathers them for any operator.
void ShardedParam::set_data(const at::Tensor& data) const {
  const c10::impl::ExcludeDispatchKeyGuard unseen(c10::python_ks);
  if (const at::Tensor tensor = this->tensor(); tensor.defined()) tensor.set_data(data);
}

void ShardedParam::mark_inflight() { set_status(ParamStatus::kInflight); }
void ShardedParam::mark_absent() {
  if (!available()) set_status(ParamStatus::kNotAvailable);
}

at::TensorOptions ShardedParam::options() const { return at::TensorOptions().dtype(dtype_).device(device_); }

SliceLease ShardedParam::stored(storage::Access access) const {
  if (!offloaded()) return SliceLease(shard_);
  return {home_.lease(access), resting_numel()};
}

SliceLease ShardedParam::slice(storage::Access access) const {
  if (!codec_) return stored(access);
  const bool keep = access != storage::Access::kRead;
  SliceLease row = stored(keep ? storage::Access::kUpdate : access);
  const at::Tensor elements = at::empty({slice_}, row.data().options().dtype(dtype_));
  return {std::move(row), elements, codec_, keep};
}

void ShardedParam::rest_as_codes(const SliceCodecPtr& codec) {
  at::NoGradGuard no_grad;
  if (codec_ || slice_ == 0 || !SliceCodec::takes(dtype_)) return;
  const at::Tensor row = at::zeros({codec->row_bytes(slice_)}, options().dtype(at::kByte));
  const at::Tensor elements = slice(storage::Access::kRead).data().to(device_);
  codec->encode({SliceCodec::pair(elements, row)});
  leave_home();  // the codes wait in memory until an engine gives them another placement
  codec_ = codec;
  shard_ = row;
  handed_ = at::Tensor();
}

const SliceCodec* ShardedParam::row_codec(Values values) const {
  return reads_codes(values) ? copies.codec.get() : codec_.get();
}

int64_t ShardedParam::row_bytes(Values values) const {
  return row_slices(values) * (reads_codes(values) ? copies.codec->row_bytes(slice_) : resting_bytes());
}

SliceLease ShardedParam::row(Values values) const {
  return reads_second(values) ? SliceLease(copies.second) : own_row(values);
}

SliceLease ShardedParam::own_row(Values values) const {
  return reads_codes(values) ? SliceLease(copies.codes) : stored(storage::Access::kRead);
}

void ShardedParam::prefetch() const {
  if (offloaded()) home_.prefetch();
}

void ShardedParam::leave_home() {
  const SliceHome left = std::exchange(home_, {});
  if (!left.storage) return;
  if (left.alone) {
    left.storage->remove(left.plane);
  } else {
    left.storage->discard(left.plane, left.range);
  }
}

ShardedParam::~ShardedParam() {
  try {
    leave_home();
  } catch (const std::exception&) {  // it goes with the storage
  }
}

void ShardedParam::move_shard(const at::Tensor& home) {
  at::NoGradGuard no_grad;
  home.copy_(stored(storage::Access::kRead).data());
  leave_home();
  shard_ = home;
}

void ShardedParam::move_shard(const SliceHome& home) {
  at::NoGradGuard no_grad;
  const storage::Lease to = home.lease(storage::Access::kWrite);
  const int64_t numel = resting_numel();
  to.data().narrow(0, 0, numel).copy_(stored(storage::Access::kRead).data());
  to.data().narrow(0, numel, home.range.numel() - numel).zero_();
  leave_home();  // before it is written: the old file has the name that the new one is to have
  home_ = home;
  shard_ = at::Tensor();
}

at::Tensor ShardedParam::second_values() const {
  if (!copies.second.defined()) return {};
  const SliceCodec* codec = row_codec(Values::kUsed);
  if (codec == nullptr) return copies.second.view(dtype_);
  const at::Tensor elements = at::empty({copies.slices, slice_}, options()),
                   rows = copies.second.view({copies.slices, -1});
  std::vector<SliceCodec::Pair> pairs;
  for (int64_t slice = 0; slice < copies.slices; ++slice)
    pairs.push_back(SliceCodec::pair(elements[slice], rows[slice]));
  codec->decode(pairs);
  return elements.view({-1});
}

void ShardedParam::leave_memory() {
  shard_ = shard_.clone();
  copies = {};
}

at::Tensor ShardedParam::slice_tensor() const {
  if (codec_) return slice(storage::Access::kRead).data();
  at::Tensor now = shard_;
  if (offloaded()) {
    // On the host memory that lasts is had by a lease there.
    const auto rests = home_.storage->resting(home_.plane, home_.range);
    if (!rests) return slice(storage::Access::kRead).data().clone();
    now = home_.storage->acquire(home_.plane, home_.range, storage::Access::kRead, *rests).data().narrow(0, 0, slice_);
  }
  const bool same = handed_.defined() && handed_.is_alias_of(now) && handed_.data_ptr() == now.data_ptr() &&
                    handed_.sizes() == now.sizes();
  if (same) return handed_;
  handed_ = now.variable_data();  // with a version of its own
  handed_version_ = version_of(handed_);
  return handed_;
}

void ShardedParam::know_slice() {
  slice_set_ = false;
  handed_version_ = version_of(handed_);
}

void ShardedParam::set_slice(const at::Tensor& values) {
  at::NoGradGuard no_grad;
  if (!in_file() && !codec_ && values.is_alias_of(slice_tensor())) return;
  const SliceLease now = slice(storage::Access::kUpdate);
  now.data().copy_(values);
  slice_set_ = true;
}

// Views of slices are made once: they come and go with each step.
void ShardedParam::take_full(const at::Tensor& buffer, Values values) {
  at::NoGradGuard no_grad;
  buffer_ = buffer;
  shown_ = resolved(values);
  if (is_own_slice()) {
    if (!viewed_.is_same(buffer)) {
      view_ = buffer.as_strided(sizes_, strides_, buffer.storage_offset());
      viewed_ = buffer;
    }
    set_data(view_);
  } else {
    set_data(buffer.as_strided(sizes_, strides_, buffer.storage_offset()));
  }
  know_values();
  data_given = false;
  set_status(ParamStatus::kAvailable);
}

void ShardedParam::release() {
  at::NoGradGuard no_grad;
  set_nothing();
  buffer_ = at::Tensor();
  set_status(ParamStatus::kNotAvailable);
}

void ShardedParam::set_nothing() {
  if (!nothing_.defined() || nothing_.scalar_type() != dtype_ || nothing_.numel() != 0)
    nothing_ = at::empty({0}, options());
  set_data(nothing_);
}

void ShardedParam::with_shape_only(const std::function<void()>& body) {
  at::NoGradGuard no_grad;
  if (available()) return body();
  set_data(at::zeros({}, options()).expand(sizes_));
  body();
  set_nothing();
}

at::Tensor ShardedParam::gathered() const {
  const at::Tensor tensor = this->tensor();
  if (!available() || !tensor.defined()) return {};
  const at::Tensor data = tensor.detach();
  if (data.strides() == at::IntArrayRef(strides_)) return data.as_strided({numel_}, {1}, data.storage_offset());
  at::Tensor ordered = at::empty_strided(sizes_, strides_, data.options());
  ordered.copy_(data);
  return ordered.as_strided({numel_}, {1}, 0);
}

bool ShardedParam::written() const {
  if (!available()) return false;
  const at::Tensor now = tensor();
  if (!now.defined()) return false;
  return version_of(now) != known_version_ || replaced();
}

// Somebody has put another tensor there as param.data.
bool ShardedParam::replaced() const {
  const at::Tensor now = tensor();
  return numel_ > 0 && buffer_.defined() && now.defined() && now.has_storage() && now.data_ptr() != buffer_.data_ptr();
}

void ShardedParam::know_values() {
  known_version_ = version_of(tensor());
  kept = false;
}

at::Tensor ShardedParam::own_values() const {
  if (!shows_decoded()) {
    const SliceLease now = slice(storage::Access::kRead);
    return now.data().narrow(0, 0, own_numel()).to(device_, /*non_blocking=*/false, /*copy=*/offloaded());
  }
  const at::Tensor decoded = at::empty({slice_}, options());
  copies.codec->decode({SliceCodec::pair(decoded, copies.codes)});
  return decoded.narrow(0, 0, own_numel());
}

bool ShardedParam::own_part_differs() const {
  at::NoGradGuard no_grad;
  const at::Tensor values = gathered();
  if (own_numel() <= 0 || !values.defined() || values.is_meta()) return false;
  return !at::equal(own_values(), values.narrow(0, own_begin(), own_numel()));
}

bool ShardedParam::user_wrote() const {
  if (!available()) return false;
  // Through param.data, and not to the slice: other ranks' slices may have been written meanwhile.
  const bool through_data = data_given && !slice_written() && (is_own_slice() || own_part_differs());
  return through_data || kept || written();
}

double ShardedParam::checksum() const {
  const at::Tensor values = gathered().cpu();
  const auto* bytes = static_cast<const unsigned char*>(values.data_ptr());
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a, eight bytes at a time
  const auto count = static_cast<size_t>(values.numel()) * values.element_size();
  for (size_t at = 0; at < count; at += sizeof hash) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + at, std::min(sizeof word, count - at));
    hash = (hash ^ word) * 0x100000001b3u;
    hash ^= hash >> 29;
  }
  return static_cast<double>((hash >> 12) + 1);  // exact in a double
}

bool ShardedParam::write_back() {
  at::NoGradGuard no_grad;
  const bool wrote = written();
  know_values();
  const at::Tensor values = gathered();
  if (!values.defined() || values.is_meta()) return false;
  if (replaced()) {  // what is gathered later comes into the buffer
    const at::Tensor view = buffer_.as_strided(sizes_, strides_, buffer_.storage_offset());
    view.copy_(tensor().detach());
    set_data(view);
  }
  if (own_numel() <= 0) return false;
  if (is_own_slice()) {
    data_given = false;
    return wrote;
  }
  // Elements that nobody has written keep what codes cannot hold.
  const at::Tensor wanted = values.narrow(0, own_begin(), own_numel());
  const at::Tensor written_to = wanted.ne(own_values());
  if (!written_to.any().item<bool>()) return false;
  const SliceLease now = slice(storage::Access::kUpdate);
  const at::Tensor own = now.data().narrow(0, 0, own_numel());
  own.copy_(at::where(written_to.to(own.device()), wanted.to(own.device()), own));
  return true;
}

}  // namespace ds::zero
