#include "zero/param_store.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>

#include "base/error.h"

namespace ds::zero {

namespace {

// Strides under which the elements fill one block of memory: the tensor's own (channels_last stays so) where they do.
std::vector<int64_t> kept_strides(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) return tensor.strides().vec();
  return at::empty(tensor.sizes(), tensor.options().device(at::kCPU)).strides().vec();
}

c10::Device common_device(const std::vector<ParamSpec>& specs, const std::vector<ShardedParamPtr>& others) {
  std::optional<std::pair<c10::Device, std::string>> first;
  const auto add = [&](c10::Device device, const std::string& name) {
    if (!first) first.emplace(device, name);
    if (device != first->first)
      fail(ErrorKind::kValue, "parameters lie on different devices: '", first->second, "' on ", first->first.str(),
           ", '", name, "' on ", device.str(), "; move the model to one device");
  };
  for (const ParamSpec& spec : specs)
    add(spec.sharded ? spec.sharded->shard().device() : spec.tensor.device(), spec.name);
  for (const ShardedParamPtr& other : others) add(other->shard().device(), other->name());
  return first ? first->first : c10::Device(at::kCPU);
}

int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.numel() * static_cast<int64_t>(tensor.element_size()) : 0;
}

}  // namespace

ParamStore::ParamStore(std::vector<ParamSpec> specs, const StoreOptions& options, std::vector<ShardedParamPtr> others)
    : specs_(std::move(specs)),
      others_(std::move(others)),
      options_(options),
      places_(specs_.size()),
      device_(common_device(specs_, others_)) {
  at::NoGradGuard no_grad;
  std::unordered_set<const void*> seen;
  for (size_t param = 0; param < specs_.size(); ++param) {
    const ParamSpec& spec = specs_[param];
    if (!seen.insert(spec.tensor.unsafeGetTensorImpl()).second)
      fail(ErrorKind::kValue, "parameter '", spec.name, "' appears twice in the optimizer's parameter groups");
    if (!spec.tensor.is_leaf())
      fail(ErrorKind::kValue, "parameter '", spec.name, "' is not a leaf tensor and cannot be optimised");
    if (!at::isFloatingType(spec.tensor.scalar_type()))
      fail(ErrorKind::kType, "parameter '", spec.name, "' has dtype ", c10::toString(spec.tensor.scalar_type()),
           "; only floating point parameters can be optimised");
    const SpaceKey key{spec.group, spec.tensor.scalar_type(),
                       options_.ranks_of ? options_.ranks_of(spec) : options_.everyone, device_};
    const auto found =
        std::find_if(spaces_.begin(), spaces_.end(), [&](const ParamSpace& space) { return space.key == key; });
    places_[param].space = static_cast<int32_t>(found - spaces_.begin());
    if (found == spaces_.end()) spaces_.emplace_back(key);
    places_[param].index = static_cast<int32_t>(space_of(param).params.size());
    space_of(param).params.push_back(static_cast<int32_t>(param));
  }
  sets_.push_back({options_.everyone, {}, {}});
  for (size_t s = 0; s < spaces_.size(); ++s) {
    auto set = std::find_if(sets_.begin(), sets_.end(),
                            [&](const SpaceSet& known) { return known.ranks == spaces_[s].ranks(); });
    if (set == sets_.end()) set = sets_.insert(set, {spaces_[s].ranks(), {}, {}});
    set->spaces.push_back(s);
    set->params.insert(set->params.end(), spaces_[s].params.begin(), spaces_[s].params.end());
  }
  for (ParamSpace& space : spaces_) plan_space(space);
  if (options_.policy.shards_params()) {
    for (size_t param = 0; param < specs_.size(); ++param)
      if (!same_ranks(space_of(param).ranks().shard, options_.everyone.shard))
        fail(ErrorKind::kNotImplemented, "parameter '", specs_[param].name, "' (rule '", specs_[param].rule,
             "') has its shards on other ranks than dense parameters; with ZeRO stage 3 values are gathered from all "
             "data-parallel ranks: use zero_optimization.stage 0, 1 or 2");
    place_shards();
  }
  for (ParamSpace& space : spaces_) build_space(space);
  for (size_t param = 0; param < specs_.size(); ++param) {
    const ParamSpace& space = space_of(param);
    const auto index_in_space = static_cast<size_t>(places_[param].index);
    if (space.in_place && places_[param].numel == 0)
      pieces_.push_back({static_cast<int32_t>(param), places_[param].space, 0, 0, SIZE_MAX});
    for (size_t e = space.map.first[index_in_space]; e < space.map.first[index_in_space + 1]; ++e)
      if (space.map.extents[e].rank == space.rank())
        pieces_.push_back({static_cast<int32_t>(param), places_[param].space, space.map.extents[e].param_offset,
                           space.map.extents[e].numel, e});
  }
}

void ParamStore::plan_space(ParamSpace& space) {
  const StagePolicy& policy = options_.policy;
  std::vector<int64_t> numels;
  std::vector<bool> by_rows;
  for (int32_t param : space.params) {
    const ParamSpec& spec = specs_[param];
    by_rows.push_back(spec.form != GradForm::kDense);
    numels.push_back(spec.numel());
    places_[param].numel = numels.back();
  }
  const int64_t parts = space.ranks().shard->size();
  space.in_place = parts == 1 && (policy.grads_on_params || (options_.everyone.alone() && !policy.shards_params()));
  space.map = policy.shards_params() ? plan::param_shards(numels, options_.align, parts, options_.bucket_numel)
                                     : plan::flat_shards(numels, options_.align, parts, options_.bucket_numel, by_rows);
  for (size_t e = 0; e < space.map.extents.size(); ++e)
    if (space.map.extents[e].rank == space.rank()) space.owned.push_back(e);
  space.lp.full = !policy.shards_params();
}

// One piece of memory for the shards of all spaces and of the parameters that are not trained.
void ParamStore::place_shards() {
  constexpr int64_t kAlignBytes = 256;
  const auto aligned = [](int64_t bytes) { return (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes; };
  int64_t total = 0;
  std::vector<int64_t> starts;
  for (const ParamSpace& space : spaces_) {
    starts.push_back(total);
    total += aligned(space.map.shard_numel * static_cast<int64_t>(c10::elementSize(space.key.dtype)));
  }
  for (const ShardedParamPtr& other : others_) {
    starts.push_back(total);
    total += aligned(bytes_of(other->shard()));
  }
  const at::Tensor region = options_.allocate(total, device_);
  size_t next = 0;
  for (ParamSpace& space : spaces_) {
    const int64_t bytes = space.map.shard_numel * static_cast<int64_t>(c10::elementSize(space.key.dtype));
    space.lp.data = region.narrow(0, starts[next++], bytes).view(space.key.dtype);
  }
  for (const ShardedParamPtr& other : others_) {
    const int64_t bytes = bytes_of(other->shard());
    other->move_shard(region.narrow(0, starts[next++], bytes).view(other->dtype()));
  }
}

void ParamStore::build_space(ParamSpace& space) {
  const StagePolicy& policy = options_.policy;
  const auto options = at::TensorOptions().device(device_).dtype(space.key.dtype);
  if (space.lp.full) space.lp.data = at::zeros({space.map.full_numel()}, options);
  adopt_params(space);

  if (!space.narrow()) {
    space.master = space.lp;
  } else {
    space.master = {at::zeros({space.map.shard_numel}, options.dtype(at::kFloat)), space.in_place};
  }
  const bool joined = space.in_place || !policy.shards_grads();
  const int64_t numel = joined ? space.map.full_numel() : space.map.shard_numel;
  space.grad = {at::zeros({numel}, options.dtype(grad_type(space))), joined};
  if (joined) space.local = space.grad.data;
}

at::ScalarType ParamStore::grad_type(const ParamSpace& space) const {
  return space.key.dtype == at::kDouble ? at::kDouble : options_.grad_dtype.value_or(space.key.dtype);
}

void ParamStore::set_grad_dtype(c10::optional<at::ScalarType> type) {
  at::NoGradGuard no_grad;
  options_.grad_dtype = type;
  for (ParamSpace& space : spaces_) {
    const bool shared = space.local.is_same(space.grad.data);
    space.grad.data = space.grad.data.to(grad_type(space));
    if (space.local.defined()) space.local = shared ? space.grad.data : space.local.to(grad_type(space));
  }
}

void ParamStore::adopt_params(ParamSpace& space) {
  for (size_t i = 0; i < space.params.size(); ++i) {
    ParamSpec& spec = specs_[space.params[i]];
    if (!space.lp.full) {
      const plan::Bucket& bucket = space.map.buckets[space.map.bucket_of[i]];
      int64_t offset = bucket.shard_begin;  // of the slice: the extent's, which every rank's slice shares
      const size_t first = space.map.first[i];
      if (first == space.map.first[i + 1]) continue;  // no elements
      offset = space.map.extents[first].shard_offset;
      spec.sharded->move_shard(space.lp.data.narrow(0, offset, spec.sharded->slice_numel()));
      continue;
    }
    const int64_t offset = space.map.offsets[i];
    at::Tensor home = space.lp.data.narrow(0, offset, space.map.numels[i])
                          .as_strided(spec.tensor.sizes(), kept_strides(spec.tensor), offset);
    home.copy_(spec.tensor);
    spec.tensor.set_data(home);
  }
}

at::Tensor ParamStore::view(size_t param, const at::Tensor& full) const {
  const at::Tensor& tensor = specs_[param].tensor;
  const int64_t offset = space_of(param).map.offsets[places_[param].index];
  return full.as_strided(tensor.sizes(), tensor.strides(), full.storage_offset() + offset);
}

at::Tensor ParamStore::piece_view(const Piece& piece, const Buffer& buffer) const {
  const ParamSpace& space = spaces_[piece.space];
  if (space.in_place) return view(piece.param, buffer.data);
  return buffer.data.narrow(0, space.offset_in(buffer, space.map.extents[piece.extent]), piece.numel);
}

void ParamStore::need_local() {
  at::NoGradGuard no_grad;
  for (ParamSpace& space : spaces_)
    if (!space.local.defined()) space.local = at::zeros({space.map.full_numel()}, space.grad.data.options());
}

void ParamStore::drop_local() {
  if (!options_.policy.shards_grads()) return;
  for (ParamSpace& space : spaces_)
    if (!space.in_place) space.local = at::Tensor();
}

bool ParamStore::grad_buffer_aliased() const {
  return std::any_of(spaces_.begin(), spaces_.end(), [](const ParamSpace& space) { return space.grad_aliased(); });
}

void ParamStore::split_grad_buffer() {
  at::NoGradGuard no_grad;
  for (ParamSpace& space : spaces_) {
    if (!space.grad_aliased()) continue;
    const Buffer joined = space.grad;
    space.grad = {at::empty({space.map.shard_numel}, joined.data.options()), false};
    for (const plan::Bucket& bucket : space.map.buckets) {
      const int64_t row = bucket.shard_end - bucket.shard_begin;
      space.grad.data.narrow(0, bucket.shard_begin, row)
          .copy_(joined.data.narrow(0, space.offset_in(joined, bucket, bucket.shard_begin), row));
    }
  }
}

void ParamStore::alias_grad_buffer() {
  if (options_.policy.shards_grads()) return;
  for (ParamSpace& space : spaces_)
    if (!space.in_place) space.grad = {space.local, true};
}

std::vector<std::pair<std::string, int64_t>> ParamStore::held_bytes() const {
  int64_t lp = 0, master = 0, grad = 0, local = 0, slots = 0;
  for (const ParamSpace& space : spaces_) {
    lp += bytes_of(space.lp.data);
    if (!space.master.data.is_same(space.lp.data)) master += bytes_of(space.master.data);
    grad += bytes_of(space.grad.data);
    if (!space.local.is_same(space.grad.data)) local += bytes_of(space.local);
    for (const Buffer& slot : space.slots) slots += bytes_of(slot.data);
  }
  return {{"lp", lp}, {"master", master}, {"grad", grad}, {"local", local}, {"slots", slots}};
}

std::vector<ShardedParamPtr> ParamStore::sharded_params() const {
  std::vector<ShardedParamPtr> result;
  for (const ParamSpec& spec : specs_)
    if (spec.sharded) result.push_back(spec.sharded);
  result.insert(result.end(), others_.begin(), others_.end());
  return result;
}

void ParamStore::release() {
  at::NoGradGuard no_grad;
  for (ParamSpec& spec : specs_)
    if (!spec.sharded) spec.tensor.set_data(spec.tensor.detach().clone());
  for (const ShardedParamPtr& param : sharded_params()) param->move_shard(param->shard().clone());
}

}  // namespace ds::zero
