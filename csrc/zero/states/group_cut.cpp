#include "zero/states/group_cut.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "base/ranges.h"
#include "zero/states/spooled_partition.h"

namespace ds::zero {

namespace {

// The first parameter of a group, or of the next one that has any.
size_t first_of(const ParamStore& store, int32_t group) {
  size_t first = 0;
  while (first < store.size() && store.spec(first).group < group) ++first;
  return first;
}

}  // namespace

GroupCut::GroupCut(const ParamStore& store, StateAccess& states, int32_t group)
    : store_(store),
      states_(states),
      first_(first_of(store, group)),
      last_(first_of(store, group + 1)),
      layout_(plan::SavedLayout::partitioned(numels_in_row(), store.everyone().shard->size())) {
  const comm::Communicator& ranks = *store.everyone().shard;
  size_ = layout_.partition(0);
  for (const Slice& slice : slices()) owned_ = slice.at + slice.numel;  // no gaps, so the last one ends them

  std::vector<plan::OwnedRun> runs;
  const std::vector<Piece>& pieces = store.pieces();
  at::ScalarType type = at::kFloat;
  size_t piece = 0;
  for (size_t param = first_; param < last_; ++param) {
    if (!in_row(param)) continue;
    while (piece < pieces.size() && pieces[piece].param < static_cast<int64_t>(param)) ++piece;
    const ParamSpace& space = store.space_of(param);
    if (space.key.dtype == at::kDouble) type = at::kDouble;
    const auto index = store.position(param).index;
    for (size_t e = space.map.first[index]; e < space.map.first[index + 1]; ++e) {
      const plan::Extent& extent = space.map.extents[e];
      runs.push_back(
          {start_of(param) + extent.param_offset, extent.numel, extent.rank, static_cast<int64_t>(piece), 0});
      if (extent.rank == space.rank()) ++piece;
    }
  }
  options_ = at::TensorOptions().device(store.device()).dtype(type);
  plan_ = plan::repartition(runs, size_, ranks.size(), ranks.rank());
}

std::vector<int64_t> GroupCut::numels_in_row() const {
  std::vector<int64_t> found;
  for (size_t param = first_; param < last_; ++param) found.push_back(in_row(param) ? store_.position(param).numel : 0);
  return found;
}

// Others are sharded over ranks of their own, and saved by their names.
bool GroupCut::in_row(size_t param) const { return store_.spec(param).rule == "dense"; }

// Files have the order of rows; pieces of parameters with other strides that of memory.
bool GroupCut::in_file_order(size_t param) const { return store_.spec(param).tensor.is_contiguous(); }

at::Tensor GroupCut::partition(const std::vector<at::Tensor>& pieces) const {
  at::NoGradGuard no_grad;
  const at::Tensor made = at::zeros({size_}, options_);
  if (size_ == 0) return made.cpu();  // nobody has anything to give
  const at::Tensor given = at::empty({sum_of(plan_.give_numels)}, options_);
  int64_t at = 0;
  for (const plan::Give& give : plan_.give) {
    const at::Tensor to = given.narrow(0, at, give.numel);
    const at::Tensor& piece = pieces.at(give.piece);
    if (piece.defined()) {
      to.copy_(piece.reshape({-1}).narrow(0, give.offset, give.numel));
    } else {
      to.zero_();
    }
    at += give.numel;
  }
  comm::Communicator& ranks = *store_.everyone().shard;
  at::Tensor taken = given;
  if (ranks.size() > 1) {
    taken = at::empty({sum_of(plan_.take_numels)}, options_);
    ranks.all_to_all(given, plan_.give_numels, taken, plan_.take_numels, "a partition of a checkpoint")->wait();
  }
  at = 0;
  for (const plan::Take& take : plan_.take) {
    made.narrow(0, take.at, take.numel).copy_(taken.narrow(0, at, take.numel));
    at += take.numel;
  }
  const std::vector<Slice> own = slices();
  for (size_t param = first_; param < last_; ++param) {
    if (in_file_order(param) || !in_row(param)) continue;
    const at::Tensor whole = states_.full_of(pieces, param);  // every rank takes part, whoever needs it
    for (const Slice& slice : own)
      if (slice.param == param && whole.defined())
        made.narrow(0, slice.at, slice.numel).copy_(whole.reshape({-1}).narrow(0, slice.offset, slice.numel));
  }
  return made.cpu();
}

std::optional<std::vector<GroupCut::Part>> GroupCut::in_pieces(const std::vector<at::Tensor>& pieces,
                                                               int64_t numel) const {
  if (store_.everyone().shard->size() != 1) return std::nullopt;
  for (size_t param = first_; param < last_; ++param)
    if (in_row(param) && (!in_file_order(param) || store_.spec(param).tensor.scalar_type() == at::kDouble))
      return std::nullopt;
  std::vector<Part> parts;
  for (size_t p = 0; p < store_.pieces().size(); ++p) {
    const Piece& piece = store_.pieces()[p];
    const auto param = static_cast<size_t>(piece.param);
    if (param < first_ || param >= last_ || !in_row(param) || !pieces.at(p).defined()) continue;
    const at::Tensor& tensor = pieces[p];
    if (tensor.scalar_type() != at::kFloat || !tensor.is_contiguous() || tensor.numel() != piece.numel)
      return std::nullopt;
    const int64_t at = start_of(param) + piece.param_offset;
    if (at < numel)
      parts.emplace_back(at, tensor.detach().reshape({-1}).narrow(0, 0, std::min(piece.numel, numel - at)));
  }
  return parts;
}

// Keeps an error of this rank until the exchanges are over: the other ranks wait for this one there.
class Collecting {
 public:
  Collecting(const std::string& folder, int64_t numel, at::ScalarType type, const std::shared_ptr<io::Files>& files) {
    attempt([&] { made_ = std::make_shared<SpooledPartition>(folder, numel, type, files); });
  }

  // False: it has failed, now or before, and nothing was done then.
  template <typename Work>
  bool attempt(const Work& work) {
    if (failed_) return false;
    try {
      work();
    } catch (...) {
      failed_ = std::current_exception();
    }
    return !failed_;
  }
  void put(int64_t at, const at::Tensor& values) {
    attempt([&] { made_->put(at, values); });
  }
  io::SourcePtr end() const {
    if (failed_) std::rethrow_exception(failed_);
    return made_;
  }

 private:
  std::shared_ptr<SpooledPartition> made_;
  std::exception_ptr failed_;
};

// The folder of files of that kind; "" if it does not rest in files.
std::string GroupCut::folder_of(StateKind kind, int slot) const {
  for (size_t param = first_; param < last_; ++param) {
    if (!in_row(param)) continue;
    const Buffer* from = states_.buffer_of(kind, slot, store_.position(param).space);
    if (from == nullptr || !from->exists()) continue;
    const storage::Placement placement = store_.storage()->placement(from->plane);
    if (placement.in_files()) return placement.folder;
  }
  return "";
}

// Holds a row of the bucket and sends it in steps, so that no rank gets much more than a row at once.
void GroupCut::exchange_bucket(const ParamSpace& space, int32_t bucket, const Buffer& from, Collecting& into) const {
  constexpr int64_t kSmall = 1 << 14;
  comm::Communicator& ranks = *store_.everyone().shard;
  const plan::Bucket& whole = space.map.buckets[bucket];
  const int64_t row = whole.shard_end - whole.shard_begin;
  const int64_t step = std::max(kSmall, row / ranks.size() + 1);
  const plan::Range own = space.row_in(from, whole);
  storage::Lease held;
  into.attempt([&] { held = store_.lease(from, own, storage::Access::kRead); });
  storage::ShardStorage& memory = *store_.storage();
  const storage::Lease given = memory.scratch(step, type(), storage::Medium::kDevice);
  const storage::Lease taken =
      memory.scratch(ranks.size() > 1 ? step * ranks.size() : 0, type(), storage::Medium::kDevice);
  for (int64_t begin = whole.shard_begin; begin < whole.shard_end; begin += step) {
    const int64_t end = std::min(begin + step, whole.shard_end);
    std::vector<plan::OwnedRun> runs;
    for (int32_t index = whole.first_param; index <= whole.last_param; ++index) {
      const auto param = static_cast<size_t>(space.params[index]);
      if (!in_row(param) || !in_file_order(param)) continue;
      for (size_t e = space.map.first[index]; e < space.map.first[index + 1]; ++e) {
        const plan::Extent& extent = space.map.extents[e];
        const int64_t low = std::max(begin, extent.shard_offset);
        const int64_t high = std::min(end, extent.shard_offset + extent.numel);
        if (low >= high) continue;
        const int64_t at = start_of(param) + extent.param_offset + low - extent.shard_offset;
        runs.push_back({at, high - low, extent.rank, 0, low - whole.shard_begin});
      }
    }
    if (runs.empty()) continue;
    const plan::Repartition plan = plan::repartition(runs, size_, ranks.size(), ranks.rank());
    int64_t at = 0;
    for (const plan::Give& give : plan.give) {
      const at::Tensor to = given.data().narrow(0, at, give.numel);
      if (!into.attempt([&] { to.copy_(held.data().narrow(0, give.offset, give.numel)); })) to.zero_();
      at += give.numel;
    }
    at::Tensor arrived = given.data();
    if (ranks.size() > 1) {
      arrived = taken.data().narrow(0, 0, sum_of(plan.take_numels));
      ranks
          .all_to_all(given.data().narrow(0, 0, at), plan.give_numels, arrived, plan.take_numels,
                      "a part of a checkpoint")
          ->wait();
    }
    at = 0;
    for (const plan::Take& take : plan.take) {
      into.put(take.at, arrived.narrow(0, at, take.numel));
      at += take.numel;
    }
  }
}

// A parameter in another order than rows.
void GroupCut::exchange_whole(size_t param, const Buffer& from, Collecting& into) const {
  const ParamSpec& spec = store_.spec(param);
  const ParamSpace& space = store_.space_of(param);
  const at::Tensor flat = at::zeros({store_.position(param).numel}, options_);
  const auto index = store_.position(param).index;
  for (size_t e = space.map.first[index]; e < space.map.first[index + 1]; ++e) {
    const plan::Extent& extent = space.map.extents[e];
    if (extent.rank != space.rank()) continue;
    into.attempt([&] {
      const int64_t begin = space.offset_in(from, extent);
      flat.narrow(0, extent.param_offset, extent.numel)
          .copy_(store_.lease(from, {begin, begin + extent.numel}, storage::Access::kRead).data());
    });
  }
  // As integers: all but one rank have zero bits.
  const at::Tensor bits = flat.view(type() == at::kDouble ? at::kLong : at::kInt);
  if (comm::Communicator& ranks = *space.ranks().shard; ranks.size() > 1)
    ranks.all_reduce(bits, comm::ReduceOp::kSum, spec.name)->wait();
  const at::Tensor rows = flat.as_strided(spec.sizes(), spec.strides(), 0).reshape({-1});
  for (const Slice& slice : slices())
    if (slice.param == param) into.put(slice.at, rows.narrow(0, slice.offset, slice.numel));
}

io::SourcePtr GroupCut::source(std::shared_ptr<const void> owner, StateKind kind, int slot, int64_t numel) const {
  at::NoGradGuard no_grad;
  const std::string folder = folder_of(kind, slot);
  if (folder.empty()) return nullptr;
  bool as_it_lies = store_.everyone().shard->size() == 1 && type() == at::kFloat;
  for (size_t param = first_; param < last_; ++param)
    if (in_row(param)) as_it_lies = as_it_lies && in_file_order(param);
  if (as_it_lies) {
    std::vector<StateSource::Run> runs;
    for (const Piece& piece : store_.pieces()) {
      const auto param = static_cast<size_t>(piece.param);
      if (param < first_ || param >= last_ || !in_row(param) || piece.numel == 0) continue;
      const Buffer* from = states_.buffer_of(kind, slot, piece.space);
      const int64_t at = start_of(param) + piece.param_offset;
      if (from == nullptr || at >= numel) continue;
      runs.push_back({at, piece, *from});
      runs.back().piece.numel = std::min(piece.numel, numel - at);
    }
    return std::make_shared<StateSource>(std::move(owner), store_, std::move(runs), numel);
  }
  Collecting made(folder, numel, type(), store_.files());
  for (size_t s = 0; s < store_.spaces().size(); ++s) {
    const ParamSpace& space = store_.spaces()[s];
    const auto in_group = [&](int32_t param) {
      return static_cast<size_t>(param) >= first_ && static_cast<size_t>(param) < last_ && in_row(param);
    };
    if (none_of(space.params, in_group)) continue;
    const Buffer* from = states_.buffer_of(kind, slot, static_cast<int32_t>(s));
    if (from == nullptr || !from->exists()) continue;
    for (size_t b = 0; b < space.map.buckets.size(); ++b) exchange_bucket(space, static_cast<int32_t>(b), *from, made);
    for (const int32_t param : space.params)
      if (in_group(param) && !in_file_order(param)) exchange_whole(static_cast<size_t>(param), *from, made);
  }
  return made.end();
}

std::vector<GroupCut::Slice> GroupCut::slices() const {
  const int32_t rank = store_.everyone().shard->rank();
  std::vector<Slice> found;
  for (size_t param = first_; param < last_; ++param)
    for (const plan::SavedRun& run : layout_.runs(param - first_))
      if (run.rank == rank) found.push_back({param, run.begin, run.numel, run.param_offset});
  return found;
}

}  // namespace ds::zero
