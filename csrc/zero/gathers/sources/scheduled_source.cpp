// Gathers that need all ranks, in an order that the ranks have learned; how they stay together: plan/gather_schedule.h.
#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <utility>

#include "base/error.h"
#include "base/ranges.h"
#include "comm/calls/numbers.h"
#include "plan/gather_schedule.h"
#include "storage/meta_memory.h"
#include "zero/gathers/sources/staged_gather.h"
#include "zero/gathers/shard_source.h"
#include "zero/rank_failures.h"

namespace ds::zero {

namespace {

using plan::GatherAct;
using plan::GatherSchedule;

constexpr int64_t kWants = 64;  // parameters that one rank names in one exchange
constexpr int64_t kHead = 3;    // and before them the halves of GatherSchedule::left_out_key, and waiting()
constexpr size_t kServed = 2;   // gathers for other ranks that are under way: this rank waits for earlier ones

class ScheduledSource : public ShardSource {
 public:
  ScheduledSource(std::vector<ShardedParamPtr> params, std::vector<GatherGroup> groups,
                  std::shared_ptr<storage::ShardStorage> storage)
      : ShardSource(std::move(storage)), params_(std::move(params)) {
    for (const GatherGroup& group : groups) {
      const auto found = find_if(ranks_, [&](const comm::CommunicatorPtr& known) { return known == group.ranks; });
      const auto number = static_cast<size_t>(found - ranks_.begin());
      if (found == ranks_.end()) ranks_.push_back(group.ranks);
      for (const ShardedParamPtr& param : group.params) group_of_[{param.get(), group.values}] = number;
    }
    for (const Values values : {Values::kUsed, Values::kExact})
      for (const ShardedParamPtr& param : params_)
        if (group_of_.count({param.get(), values})) {
          index_[{param.get(), values}] = static_cast<int32_t>(wanted_.size());
          wanted_.push_back({param.get(), values});
        }
  }

  void gather(const std::vector<ShardedParam*>& params, const std::vector<ShardedParam*>& ahead,
              Values values) override {
    at::NoGradGuard no_grad;
    prefetch(params, values);
    prefetch(ahead, Values::kUsed);
    if (schedule_.waiting() > 0) schedule_.needs(numbers_of(params, values));
    for (auto absent = not_started(params, values); !absent.empty(); absent = not_started(params, values)) {
      const GatherAct act = schedule_.toward(absent);
      if (act.exchange) {
        exchange(absent, schedule_.hints() ? not_started(ahead, Values::kUsed) : GatherSchedule::Params{});
      } else {
        issue(act, /*begun=*/false);
      }
    }
    start(ahead);
    std::vector<std::pair<ShardedParam*, at::Tensor>> here;
    for (ShardedParam* param : absent(params, values)) {
      const auto found = started_.find({param, param->resolved(values)});
      if (found == started_.end()) continue;
      here.emplace_back(param, found->second->take(*param, values));
      started_.erase(found);
    }
    take_full(here, values);
  }

  // In a step that is planned for the CPU this source stands for the memory of peers, which nothing is fetched from
  // ahead.
  bool looks_ahead() const override {
    return !buffers_.device().is_meta() || !storage::computes_on_host(buffers_.device());
  }
  void leave_out(const std::vector<ShardedParam*>& params) override {
    schedule_.leave_out(numbers_of(params, Values::kUsed));
  }

  void forget_ahead() override {
    for (const auto& [wanted, gather] : started_) wanted.first->mark_absent();
    started_.clear();
  }

  void drain() override {
    at::NoGradGuard no_grad;
    for (bool open = true; open;) {
      const GatherAct act = schedule_.toward_end();
      if (act.exchange) {
        open = exchange({}, {});
      } else {
        issue(act, /*begun=*/true);
      }
    }
    served_.clear();
  }

  void refresh(const std::vector<ShardedParam*>& params, Values values) override {
    drain();
    std::vector<Wanted> wanted;
    for (ShardedParam* param : params) wanted.push_back({param, refreshed(*param, values)});
    for (const auto& [ranks, of] : orders())
      if (const auto part = part_of(wanted, ranks, of); !part.empty()) refresh_together(*ranks_[ranks], part, of);
  }
  bool meet_writes(bool wrote, int64_t) override { return wrote && ranks_.size() == 1 && ranks_[0]->size() == 1; }
  void before_write() override {
    drain();
    forget_ahead();
  }
  void after_write() override {}
  const char* name() const override { return "scheduled collectives"; }

 private:
  using Wanted = std::pair<ShardedParam*, Values>;

  // One entry of the order: its parameters from each group.
  class Gather {
   public:
    void add(Values values, std::unique_ptr<StagedGather> part) { parts_.emplace_back(values, std::move(part)); }
    at::Tensor take(const ShardedParam& param, Values values) {
      for (const auto& [of, part] : parts_)
        if (of == param.resolved(values) && contains(part->params(), &param)) return part->take(param);
      fail(ErrorKind::kRuntime, "parameter '", param.name(), "' is not in this gather");
    }

   private:
    std::vector<std::pair<Values, std::unique_ptr<StagedGather>>> parts_;
  };
  using GatherPtr = std::shared_ptr<Gather>;

  // The parts of an entry, in their order: which communicator, which values.
  std::vector<std::pair<size_t, Values>> orders() const {
    std::vector<std::pair<size_t, Values>> all;
    for (size_t ranks = 0; ranks < ranks_.size(); ++ranks)
      for (const Values values : {Values::kUsed, Values::kExact}) all.emplace_back(ranks, values);
    return all;
  }
  std::vector<ShardedParam*> part_of(const std::vector<Wanted>& wanted, size_t ranks, Values values) const {
    std::vector<ShardedParam*> result;
    for (const Wanted& one : wanted)
      if (one.second == values && group_of_.at(one) == ranks) result.push_back(one.first);
    return result;
  }

  // Their numbers, ascending, without those that are here or on their way.
  GatherSchedule::Params not_started(const std::vector<ShardedParam*>& params, Values values) const {
    GatherSchedule::Params result;
    for (ShardedParam* param : params) {
      if (param->shows(values) || started_.count({param, param->resolved(values)})) continue;
      result.push_back(number_of(param, values));
    }
    sort_unique(result);
    return result;
  }

  GatherSchedule::Params numbers_of(const std::vector<ShardedParam*>& params, Values values) const {
    GatherSchedule::Params result;
    for (ShardedParam* param : params) result.push_back(number_of(param, values));
    sort_unique(result);
    return result;
  }

  int32_t number_of(ShardedParam* param, Values values) const {
    const auto found = index_.find({param, param->resolved(values)});
    if (found == index_.end())
      fail(ErrorKind::kRuntime, "parameter '", param->name(), "' does not belong to this engine");
    return found->second;
  }

  void issue(const GatherAct& act, bool begun) {
    const auto made = start_gather(schedule_.entry(act.entry), begun);
    if (act.wanted) {
      keep(made, schedule_.entry(act.entry));
    } else {
      served_.push_back(made);
      if (served_.size() > kServed) served_.pop_front();
    }
    schedule_.issued(act);
  }

  // Entries that are wanted soon, as far as their slices are here and there is memory.
  void start(const std::vector<ShardedParam*>& ahead) {
    while (true) {
      const auto act = schedule_.ahead(not_started(ahead, Values::kUsed));
      if (!act || !here(schedule_.entry(act->entry))) return;
      try {
        issue(*act, /*begun=*/false);
      } catch (const c10::OutOfMemoryError&) {  // it is tried again when they are needed
        return;
      }
    }
  }

  // Their slices are.
  bool here(const GatherSchedule::Params& entry) const {
    return all_of(entry, [&](int32_t index) {
      const auto& [param, values] = wanted_[static_cast<size_t>(index)];
      return !param->row_elsewhere(values) || param->here();
    });
  }

  // Everybody says what it wants, everybody helps. False when nobody wanted anything.
  bool exchange(const GatherSchedule::Params& wanted, const GatherSchedule::Params& hints) {
    GatherSchedule::Params wants = wanted;
    append(wants, hints);
    wants.resize(std::min(wants.size(), static_cast<size_t>(kWants)));
    const plan::GatherSchedule::Bits& own = schedule_.wanted_entries();
    const auto words = static_cast<int64_t>(own.size()), width = kHead + kWants + words;
    const at::Tensor mine = at::full({width}, -1, at::kInt);
    const uint64_t key = schedule_.left_out_key();
    auto* const row = mine.data_ptr<int32_t>();
    std::memcpy(row, &key, sizeof(key));
    row[kHead - 1] = static_cast<int32_t>(schedule_.waiting());
    std::copy(wants.begin(), wants.end(), row + kHead);
    std::copy(own.begin(), own.end(), row + kHead + kWants);
    const at::Tensor host = comm::gather_numbers(*ranks_[0], mine, buffers_.device(), "what ranks want to gather");
    ++exchanges_;
    GatherSchedule::Params all;
    GatherSchedule::Bits entries(own.size());
    bool alike = true;
    int32_t waiting = 0;
    for (int64_t rank = 0; rank < host.size(0); ++rank) {
      const int32_t* theirs = host.data_ptr<int32_t>() + rank * width;
      alike = alike && std::memcmp(theirs, &key, sizeof(key)) == 0;
      waiting = std::max(waiting, theirs[kHead - 1]);
      all.insert(all.end(), theirs + kHead, theirs + kHead + kWants);
      for (int64_t word = 0; word < words; ++word)
        entries[word] |= static_cast<uint32_t>(theirs[kHead + kWants + word]);
    }
    erase_if(all, [](int32_t index) { return index < 0; });
    sort_unique(all);
    if (!all.empty()) keep(start_gather(all, /*begun=*/true), wants);
    return schedule_.exchanged(all, alike, static_cast<size_t>(waiting), entries);
  }

  // `begun`: the other ranks wait for this one, so they have to be told if it has no memory.
  GatherPtr start_gather(const GatherSchedule::Params& indices, bool begun) {
    std::vector<Wanted> wanted;
    for (int32_t index : indices) wanted.push_back(wanted_[static_cast<size_t>(index)]);
    auto made = std::make_shared<Gather>();
    for (const auto& [ranks, values] : orders()) {
      std::vector<ShardedParam*> part = part_of(wanted, ranks, values);
      if (part.empty()) continue;
      try {
        auto gather = std::make_unique<StagedGather>(*ranks_[ranks], buffers_, std::move(part), values);
        collectives_ += gather->collectives();
        made->add(values, std::move(gather));
      } catch (const c10::OutOfMemoryError& error) {
        if (!begun) throw;
        throw LoneFailure(ErrorKind::kRuntime,
                          std::string("there is no memory to gather parameters: ") + error.what_without_backtrace());
      }
      begun = true;
    }
    return made;
  }

  void keep(const GatherPtr& gather, const GatherSchedule::Params& wants) {
    for (int32_t index : wants) {
      const Wanted& wanted = wanted_[static_cast<size_t>(index)];
      ShardedParam* param = wanted.first;
      if (param->shows(wanted.second) || !started_.emplace(wanted, gather).second) continue;
      gathered_ += param->padded_numel() - param->slice_numel() * param->row_slices(wanted.second);
      if (!param->available()) param->mark_inflight();
    }
  }

  std::vector<comm::CommunicatorPtr> ranks_;  // the first ones agree on the order
  std::vector<ShardedParamPtr> params_;
  std::map<Wanted, size_t> group_of_;  // the number of its communicator
  std::map<Wanted, int32_t> index_;
  std::vector<Wanted> wanted_;  // by index
  GatherSchedule schedule_;
  std::deque<GatherPtr> served_;
  std::map<Wanted, GatherPtr> started_;
};

ShardSourcePtr make_scheduled(SourceParts parts) {
  for (GatherGroup& group : parts.groups)  // in one order on all ranks
    if (group.space.open)
      group.ranks =
          group.space.open(group.along.empty() ? group.space.axes.shard : group.along, plan::Purpose::kGather);
  return scheduled_source(std::move(parts.params), std::move(parts.groups), std::move(parts.storage));
}

const ShardSourceRegistration scheduled_registration({"scheduled collectives", 20, nullptr, &make_scheduled});

}  // namespace

ShardSourcePtr scheduled_source(std::vector<ShardedParamPtr> params, std::vector<GatherGroup> groups,
                                std::shared_ptr<storage::ShardStorage> storage) {
  return std::make_shared<ScheduledSource>(std::move(params), std::move(groups), std::move(storage));
}

}  // namespace ds::zero
