#include "zero/spaces/param_store.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>

#include "base/error.h"
#include "base/ranges.h"
#include "io/folders/paths.h"
#include "storage/meta_memory.h"

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
  for (const ParamSpec& spec : specs) add(spec.device(), spec.name);
  for (const ShardedParamPtr& other : others) add(other->device(), other->name());
  return first ? first->first : c10::Device(at::kCPU);
}

// The lock is beside the folder.
std::shared_ptr<io::RunFolder> owned(const std::string& folder) {
  const std::string name = folder.substr(folder.rfind('/') + 1);
  return std::make_shared<io::RunFolder>(io::parent_folder(folder), name, std::vector<std::string>{});
}

// A buffer can be two at once.
bool rest_alike(const storage::Placement& a, const storage::Placement& b) {
  const bool whole = a.host_share == 1.0 && b.host_share == 1.0;
  return a.rest == b.rest && a.file_share == b.file_share &&
         (whole || (a.work == b.work && a.host_share == b.host_share));
}

}  // namespace

ParamStore::ParamStore(std::vector<ParamSpec> specs, const StoreOptions& options, std::vector<ShardedParamPtr> others)
    : specs_(std::move(specs)),
      others_(std::move(others)),
      options_(options),
      positions_(specs_.size()),
      device_(common_device(specs_, others_)),
      storage_(std::make_shared<storage::ShardStorage>(device_, options_.budget, options_.files)) {
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
                       options_.ranks_of ? options_.ranks_of(spec) : options_.everyone, options_.placements};
    const auto found = find_if(spaces_, [&](const ParamSpace& space) { return space.key == key; });
    positions_[param].space = static_cast<int32_t>(found - spaces_.begin());
    if (found == spaces_.end()) spaces_.emplace_back(key);
    positions_[param].index = space_of(param).params.size();
    space_of(param).params.push_back(static_cast<int32_t>(param));
  }
  sets_.push_back({options_.everyone, {}, {}});
  for (size_t s = 0; s < spaces_.size(); ++s) {
    auto set = find_if(sets_, [&](const SpaceSet& known) { return reduce_alike(known.ranks, spaces_[s].ranks()); });
    if (set == sets_.end()) set = sets_.insert(set, {spaces_[s].ranks(), {}, {}});
    set->spaces.push_back(s);
    append(set->params, spaces_[s].params);
  }
  for (ParamSpace& space : spaces_) plan_space(space);
  if (options_.policy.shards_params()) {
    check_slices();
    allocate_shards();
  }
  if (options_.swapping.buffer_count > 0) {
    // A buffer is a row of fp32, aligned. One more is for the parameters on their way back.
    const Swapping& swapping = options_.swapping;
    const int64_t row = largest_row() * 4 + 2 * int64_t{4096};
    // Planes that rest there, and the buffers of slices of parameters, are counted apart.
    const int64_t others = storage_->usage()[1].resting + (offloaded_ ? offloaded_->limit() : 0);
    const int64_t rows = row * (swapping.buffer_count + 1) * (1 + swapping.reads_ahead + swapping.writes_behind);
    host_limit_ = rows > INT64_MAX / 2 - others ? 0 : rows + others;
    if (host_limit_ > 0) storage_->limit(storage::Medium::kHost, host_limit_);
  }
  if (options_.swapping.leaving_rows > 0 && options_.placements.moves_grads()) {
    grad_copies_ = storage_->add_scratch_user();
    limit_leaving();
  }
  const Placements& rest = options_.placements;
  for (const storage::Placement& placement : {rest.master, rest.grad, rest.slot})
    if (options_.swapping.own_folder && placement.in_files() && !state_folder_) state_folder_ = owned(placement.folder);
  for (ParamSpace& space : spaces_) build_space(space);
  for (size_t param = 0; param < specs_.size(); ++param) {
    const ParamSpace& space = space_of(param);
    const auto index_in_space = positions_[param].index;
    if (space.in_place && positions_[param].numel == 0)
      pieces_.push_back({static_cast<int32_t>(param), positions_[param].space, 0, 0, SIZE_MAX});
    for (size_t e = space.map.first[index_in_space]; e < space.map.first[index_in_space + 1]; ++e)
      if (space.map.extents[e].rank == space.rank())
        pieces_.push_back({static_cast<int32_t>(param), positions_[param].space, space.map.extents[e].param_offset,
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
    positions_[param].numel = numels.back();
  }
  const int64_t parts = space.ranks().shard->size();
  const bool alone = options_.everyone.alone() && !policy.shards_params() && !space.key.placements.moves_grads();
  space.in_place = parts == 1 && (policy.grads_on_params || alone);
  space.map = policy.shards_params() ? plan::param_shards(numels, options_.align, parts, options_.bucket_numel)
                                     : plan::flat_shards(numels, options_.align, parts, options_.bucket_numel, by_rows);
  for (size_t e = 0; e < space.map.extents.size(); ++e)
    if (space.map.extents[e].rank == space.rank()) space.owned.push_back(e);
  space.lp.full = !policy.shards_params();
  space.lp.dtype = space.key.dtype;
}

void ParamStore::build_space(ParamSpace& space) {
  if (space.lp.full) space.lp = make_buffer(space, "parameters", space.key.dtype, true);
  adopt_params(space);

  const bool narrow = space.key.dtype == at::kHalf || space.key.dtype == at::kBFloat16;
  if (!narrow && rest_alike(space.key.placements.master, space.key.placements.lp)) {
    space.master = space.lp;
  } else {
    space.master = make_buffer(space, "masters", narrow ? at::kFloat : space.key.dtype, space.in_place,
                               space.key.placements.master);
    fill_masters(space);
  }
  const bool joined = space.in_place || !keeps_grads_apart(space);
  space.grad = make_grads(space, "gradients", grad_type(space), joined,
                          joined ? storage::Placement{} : space.key.placements.grad);
  if (joined) space.local = space.grad;
}

void ParamStore::fill_masters(ParamSpace& space) {
  for (const plan::Bucket& bucket : space.map.buckets) {
    const plan::Range from = space.row_in(space.lp, bucket);
    const storage::Lease values = lease(space.lp, from, storage::Access::kRead);
    lease(space.master, space.row_in(space.master, bucket), storage::Access::kWrite).data().copy_(values.data());
  }
}

// ---- buffers ------------------------------------------------------------------------------------------------------

storage::PlaneId ParamStore::add_plane(const ParamSpace& space, const char* name, const Buffer& buffer,
                                       const storage::Placement& placement, storage::PlaneExtras extras) {
  storage::Cuts cuts;
  for (const plan::Bucket& bucket : space.map.buckets) {
    const plan::Range row = extras.apart ? space.block_in(buffer, bucket) : space.row_in(buffer, bucket);
    cuts.push_back(row.begin);
    cuts.push_back(row.end);
  }
  cuts.push_back(buffer.numel);
  sort_unique(cuts);
  if (cuts.front() == 0) cuts.erase(cuts.begin());
  const int64_t before = rest_on_host();
  widen(buffer.bytes());  // planes that rest there are not counted among the buffers
  if (placement.in_files()) extras.folder = state_folder_;
  const storage::PlaneId added = storage_->add(name, buffer.numel, buffer.dtype, placement, std::move(cuts), extras);
  widen(rest_on_host() - before - buffer.bytes());
  return added;
}

// Rows of the largest bucket, as whole blocks, aligned.
void ParamStore::limit_leaving() {
  if (grad_copies_.number == 0) return;
  int64_t width = 0;
  for (const ParamSpace& space : spaces_)
    width = std::max(width, static_cast<int64_t>(c10::elementSize(grad_type(space))));
  const int64_t row = largest_row() * width + 2 * int64_t{4096}, rows = options_.swapping.leaving_rows;
  storage_->limit_scratch(storage::Medium::kDevice, rows > INT64_MAX / row ? INT64_MAX : rows * row, grad_copies_);
}

int64_t ParamStore::rest_on_host() const { return host_limit_ > 0 ? storage_->usage()[1].resting : 0; }

void ParamStore::widen(int64_t bytes) {
  if (host_limit_ == 0) return;
  host_limit_ += bytes;
  storage_->limit(storage::Medium::kHost, host_limit_);
}

Buffer ParamStore::make_buffer(const ParamSpace& space, const char* name, at::ScalarType dtype, bool full,
                               const storage::Placement& placement, storage::ScratchUser copies) {
  Buffer made;
  made.dtype = dtype;
  made.full = full;
  made.numel = full ? space.map.full_numel() : space.map.shard_numel;
  made.plane = add_plane(space, name, made, placement, {{}, {}, {}, copies});
  if (storage_->resting(made.plane, {0, made.numel}) == storage::Medium::kDevice) {
    made.data = storage_->resident(made.plane);
    made.data.zero_();
    return made;
  }
  if (options_.swapping.fast_init && placement.rest == storage::Medium::kFile && placement.host_share == 1.0)
    return made;
  for (const plan::Bucket& bucket : space.map.buckets)
    lease(made, space.row_in(made, bucket), storage::Access::kWrite).data().zero_();
  return made;
}

void ParamStore::drop(Buffer& buffer) {
  const int64_t before = rest_on_host();
  if (buffer.exists()) storage_->remove(buffer.plane);
  widen(rest_on_host() - before);
  buffer = {};
}

storage::Lease ParamStore::lease(const Buffer& buffer, plan::Range range, storage::Access access) const {
  return storage_->acquire(buffer.plane, range, access,
                           storage_->resting(buffer.plane, range).value_or(storage::Medium::kHost));
}

void ParamStore::adopt_params(ParamSpace& space) {
  for (size_t i = 0; i < space.params.size(); ++i) {
    ParamSpec& spec = specs_[space.params[i]];
    if (offloaded_) continue;  // they have moved
    if (!space.lp.full) {
      const plan::Bucket& bucket = space.map.buckets[space.map.bucket_of[i]];
      int64_t offset = bucket.shard_begin;  // of the slice: the extent's, which every rank's slice shares
      const size_t first = space.map.first[i];
      if (first == space.map.first[i + 1]) continue;  // no elements
      offset = space.map.extents[first].shard_offset;
      spec.sharded->move_shard(space.lp.data.narrow(0, offset, spec.sharded->slice_numel()));
      continue;
    }
    make_home(space.params[i], spec.tensor.sizes(), kept_strides(spec.tensor));
    spec.home.copy_(spec.tensor);
    spec.tensor.set_data(spec.home);
  }
}

plan::Range ParamStore::range_of(const Piece& piece, const Buffer& buffer) const {
  if (piece.numel == 0) return {0, 0};
  const ParamSpace& space = spaces_[piece.space];
  const int64_t begin = space.in_place ? space.map.offsets[positions_[piece.param].index]
                                       : space.offset_in(buffer, space.map.extents[piece.extent]);
  return {begin, begin + piece.numel};
}

at::Tensor ParamStore::shaped(const Piece& piece, const at::Tensor& flat) const {
  const ParamSpec& like = specs_[piece.param];
  return spaces_[piece.space].in_place ? flat.as_strided(like.sizes(), like.strides(), flat.storage_offset()) : flat;
}

at::Tensor ParamStore::piece_view(const Piece& piece, const Buffer& buffer) const {
  const plan::Range range = range_of(piece, buffer);
  if (buffer.data.defined()) return shaped(piece, buffer.data.narrow(0, range.begin, range.numel()));
  if (range.numel() > 0 && !storage_->resting(buffer.plane, range)) {
    const storage::MetaOwner scope(storage::MetaMemory::kElsewhere);
    return shaped(piece, at::empty({range.numel()}, at::TensorOptions().device(at::kMeta).dtype(buffer.dtype)));
  }
  storage::Lease arrived;
  if (!buffer.apart) arrived = lease(buffer, range, storage::Access::kRead);  // waits until the range is written back
  return shaped(piece, storage_->resident(buffer.plane, range));
}

std::pair<storage::Lease, at::Tensor> ParamStore::piece_lease(const Piece& piece, const Buffer& buffer,
                                                              storage::Access access) const {
  storage::Lease held = lease(buffer, range_of(piece, buffer), access);
  at::Tensor data = shaped(piece, held.data());
  return {std::move(held), std::move(data)};
}

bool ParamStore::alone() const {
  return all_of(sets_, [](const SpaceSet& set) { return set.ranks.alone(); });
}

int64_t ParamStore::largest_row() const {
  int64_t largest = 0;
  for (const ParamSpace& space : spaces_)
    for (const plan::Bucket& b : space.map.buckets) largest = std::max(largest, b.shard_end - b.shard_begin);
  return largest;
}

std::vector<std::pair<std::string, int64_t>> ParamStore::held_bytes() const {
  int64_t lp = 0, master = 0, grad = 0, local = 0, slots = 0;
  for (const ParamSpace& space : spaces_) {
    lp += space.lp.bytes();
    if (space.has_masters()) master += space.master.bytes();
    grad += space.grad.bytes();
    if (!space.local.is(space.grad)) local += space.local.bytes();
    for (const Buffer& slot : space.slots) slots += slot.bytes();
  }
  return {{"lp", lp}, {"master", master}, {"grad", grad}, {"local", local}, {"slots", slots}};
}

std::vector<std::pair<storage::PlaneId, int64_t>> ParamStore::planes(const std::string& what) const {
  std::vector<std::pair<storage::PlaneId, int64_t>> found;
  const auto add = [&](const Buffer& buffer) {
    if (buffer.exists()) found.emplace_back(buffer.plane, buffer.bytes());
  };
  for (const ParamSpace& space : spaces_) {
    const bool lp_alone = !options_.policy.shards_params();  // else one region is of all spaces
    if (what == "lp" && lp_alone) add(space.lp);
    if (what == "master" && (space.has_masters() || lp_alone)) add(space.master);
    if (what == "grad") add(space.grad);
    if (what == "grad" && !space.local.is(space.grad)) add(space.local);
    for (const Buffer& slot : space.slots)
      if (what == "slots") add(slot);
  }
  return found;
}

}  // namespace ds::zero
