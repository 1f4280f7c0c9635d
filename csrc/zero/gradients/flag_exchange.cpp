#include "zero/gradients/flag_exchange.h"

#include <ATen/Functions.h>

#include "comm/calls/numbers.h"

namespace ds::zero {

FlagExchange::FlagExchange(const ParamStore& store, const std::vector<int32_t>& space_of_bucket)
    : store_(store), buckets_(store.sets().size()) {
  std::vector<size_t> set_of(store.spaces().size());
  for (size_t set = 0; set < store.sets().size(); ++set)
    for (size_t space : store.sets()[set].spaces) set_of[space] = set;
  for (size_t b = 0; b < space_of_bucket.size(); ++b)
    buckets_[set_of[static_cast<size_t>(space_of_bucket[b])]].push_back(static_cast<int32_t>(b));
}

void FlagExchange::sum(BackwardFlags& flags) const {
  for (size_t s = 0; s < store_.sets().size(); ++s) {
    const SpaceSet& set = store_.sets()[s];
    if (set.ranks.alone()) continue;
    const bool of_all = s == 0;
    const size_t count = set.params.size() + buckets_[s].size() + (of_all ? flags.failed_ranks.size() + flags.agreed.size() : 0);
    at::Tensor sent = at::empty({static_cast<int64_t>(count)}, at::TensorOptions().dtype(at::kFloat));
    const auto each = [&](const auto& visit) {
      float* value = sent.data_ptr<float>();
      for (int32_t param : set.params) visit(*value++, flags.used[static_cast<size_t>(param)]);
      for (int32_t bucket : buckets_[s]) visit(*value++, flags.late[static_cast<size_t>(bucket)]);
      if (!of_all) return;
      for (float& failed : flags.failed_ranks) visit(*value++, failed);
      for (float& bit : flags.agreed) visit(*value++, bit);
    };
    each([](float& wire, float flag) { wire = flag; });
    for (const comm::CommunicatorPtr& ranks : {set.ranks.shard, set.ranks.replicas})
      comm::sum_numbers(*ranks, sent, store_.device(), "flags of used parameters");
    each([](float wire, float& flag) { flag = wire; });
  }
}

}  // namespace ds::zero
