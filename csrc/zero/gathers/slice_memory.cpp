#include "zero/gathers/slice_memory.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "base/ranges.h"

namespace ds::zero {

namespace {

// Memory that the ranks share where they are on one host; `peers` is null elsewhere.
at::Tensor shared(int64_t bytes, c10::Device device, const comm::CommunicatorPtr& ranks, comm::PeerMemoryPtr* peers) {
  *peers = device.is_cpu() ? ranks->peer_memory(bytes) : nullptr;
  if (*peers) return (*peers)->region(ranks->rank());
  return at::zeros({bytes}, at::TensorOptions().device(device).dtype(at::kByte));
}

// Trained parameters that are frozen by now keep their masters, and take the values that codes hold.
void round_frozen(ParamStore& store, const SliceCodecPtr& codec) {
  for (size_t param = 0; param < store.size(); ++param) {
    const ParamSpec& spec = store.spec(param);
    if (spec.tensor.requires_grad() || spec.sharded->slice_numel() == 0 || !SliceCodec::takes(spec.sharded->dtype()))
      continue;
    const SliceLease slice = spec.sharded->slice(storage::Access::kUpdate);
    const at::Tensor values = slice.data().to(store.device());
    const at::Tensor row =
        at::empty({codec->row_bytes(values.numel())}, at::TensorOptions().device(values.device()).dtype(at::kByte));
    codec->encode({SliceCodec::pair(values, row)});
    codec->decode({SliceCodec::pair(values, row)});
    if (!values.is_alias_of(slice.data())) slice.data().copy_(values);
    spec.sharded->note_slice_written();
  }
}

}  // namespace

at::Tensor SliceMemory::allocate(int64_t bytes, c10::Device device, const comm::CommunicatorPtr& ranks) {
  peers_.push_back(nullptr);
  return shared(bytes, device, ranks, &peers_.back());
}

SliceCopierPtr SliceMemory::make_copies(const ParamStore& store) {
  const SpaceRanks& everyone = store.everyone();
  const bool second = !everyone.axes.inner.empty() && everyone.shard->size() > 1;
  if (everyone.shard->size() == 1 || (!codes_ && !second)) return nullptr;
  const auto made = std::make_shared<SliceCopier>(store.storage());
  const std::vector<ShardedGroup> groups = store.sharded_groups();
  const SliceCodecPtr codec = codes_ ? SliceCodec::travelling(store.device(), threads_) : nullptr;
  code_peers_.assign(groups.size(), nullptr);
  std::vector<ShardedParamPtr> dense;
  for (size_t number = 0; number < groups.size(); ++number) {
    const ShardedGroup& group = groups[number];
    if (same_ranks(group.ranks.shard, everyone.shard)) append(dense, group.params);
    if (!codec || group.ranks.shard->size() == 1) continue;
    made->add_codes(group.params, codec, [&](int64_t bytes) {
      return shared(bytes, store.device(), group.ranks.shard, &code_peers_[number]);
    });
  }
  if (second) {
    second_ranks_ = everyone.open(everyone.axes.inner, plan::Purpose::kGather);
    const comm::CommunicatorPtr outer = everyone.open(everyone.axes.outer, plan::Purpose::kGather);
    if (outer->size() > 1)
      made->add_second(dense, outer,
                       [&](int64_t bytes) { return shared(bytes, store.device(), second_ranks_, &second_peers_); });
  }
  return made;
}

// Parameters of one group by what is gathered of them, and among which ranks.
std::vector<GatherGroup> SliceMemory::groups_of(const ParamStore& store, size_t number, const ShardedGroup& group,
                                                int64_t publications) const {
  const comm::PeerMemoryPtr memory = peers_.empty() ? nullptr : peers_.at(number);
  GatherGroup plain{group.ranks.shard, {}, memory, group.ranks};
  // Slices of trained parameters stay in the same memory.
  if (group.trained) plain.published = publications;
  GatherGroup exact = plain, coded = plain, second = plain;
  coded.published = second.published = 0;
  exact.values = Values::kExact;
  if (!code_peers_.empty()) coded.memory = code_peers_[number];
  second.memory = second_peers_;
  second.along = store.everyone().axes.inner;
  for (const ShardedParamPtr& param : group.params) {
    if (param->copies.any()) exact.params.push_back(param);
    (param->copies.second.defined() ? second : param->copies.codec ? coded : plain).params.push_back(param);
  }
  if (!second.params.empty()) second.ranks = second_ranks_;
  std::vector<GatherGroup> found;
  for (GatherGroup* one : {&plain, &exact, &coded, &second})
    if (!one->params.empty() || (one == &plain && number == 0)) found.push_back(std::move(*one));
  return found;
}

ShardSourcePtr SliceMemory::source(const ParamStore& store, int64_t publications) const {
  const comm::CommunicatorPtr& everyone = store.everyone().shard;
  SourceParts parts{store.sharded_params(), {}, store.storage()};
  const std::vector<ShardedGroup> groups = store.sharded_groups();
  for (size_t number = 0; number < groups.size(); ++number)
    append(parts.groups, groups_of(store, number, groups[number], publications));
  // The ranks of one group have an answer in common.
  const bool differ = parts.groups.size() > 1 && everyone->size() > 1;
  return source_of(std::move(parts), store.everyone().axes.source, [&](bool here) {
    if (!differ) return here;
    const at::Tensor without = at::full({1}, here ? 0 : 1, at::TensorOptions().dtype(at::kInt).device(store.device()));
    everyone->all_reduce(without, comm::ReduceOp::kSum, "whether ranks share memory")->wait();
    return without.item<int>() == 0;
  });
}

void SliceMemory::code_frozen(ParamStore& store, ParamGatherer& gatherer, const std::function<void()>& adopt) {
  at::NoGradGuard no_grad;
  gatherer.release_all();
  const SliceCodecPtr codec = SliceCodec::resting(store.device(), threads_);
  round_frozen(store, codec);
  adopt();
  for (const ShardedParamPtr& other : store.others()) other->rest_as_codes(codec);
  for (const ShardedParamPtr& param : store.sharded_params()) param->copies = {};
  const std::vector<ShardedGroup> groups = store.sharded_groups();
  const auto trained = std::count_if(groups.begin(), groups.end(), [](const ShardedGroup& one) { return one.trained; });
  peers_.resize(std::min(peers_.size(), static_cast<size_t>(trained)));
  store.rehome_others();
  gatherer.use_copies(make_copies(store));
  gatherer.use_source(source(store, gatherer.publications()));
}

}  // namespace ds::zero
