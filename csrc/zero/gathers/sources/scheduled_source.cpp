// Gathers that need all ranks, in an order that the ranks have learned; how they stay together: plan/gather_schedule.h.
#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "base/ranges.h"
#include "plan/gather_schedule.h"
#include "storage/fence.h"
#include "zero/gathers/sources/staged_gather.h"
#include "zero/gathers/shard_source.h"
#include "zero/rank_failures.h"

namespace ds::zero {

namespace {

using plan::GatherAct;
using plan::GatherSchedule;

constexpr int kLag = 4;         // gathers under way at one time
constexpr int64_t kWants = 64;  // parameters that one rank names in one exchange
constexpr int64_t kHead = 3;    // and before them the halves of GatherSchedule::left_out_key, and waiting()

class ScheduledSource : public ShardSource {
 public:
  ScheduledSource(std::vector<ShardedParamPtr> params, std::vector<GatherGroup> groups,
                  std::shared_ptr<storage::ShardStorage> storage)
      : ShardSource(std::move(storage)), params_(std::move(params)), group_of_(params_.size()), schedule_(kLag) {
    for (size_t i = 0; i < params_.size(); ++i) index_[params_[i].get()] = static_cast<int32_t>(i);
    for (size_t group = 0; group < groups.size(); ++group) {
      ranks_.push_back(groups[group].ranks);
      for (const ShardedParamPtr& param : groups[group].params) group_of_[index_.at(param.get())] = group;
    }
  }

  void gather(const std::vector<ShardedParam*>& params, const std::vector<ShardedParam*>& ahead) override {
    at::NoGradGuard no_grad;
    prefetch(params);
    prefetch(ahead);
    if (schedule_.waiting() > 0) schedule_.needs(numbers_of(params));
    for (auto absent = not_started(params); !absent.empty(); absent = not_started(params)) {
      read_notes(false);
      const GatherAct act = schedule_.toward(absent);
      if (act.exchange) {
        exchange(absent, schedule_.hints() ? not_started(ahead) : GatherSchedule::Params{});
      } else {
        issue(act, /*begun=*/false);
      }
    }
    start(ahead);
    std::vector<std::pair<ShardedParam*, at::Tensor>> here;
    for (ShardedParam* param : params) {
      const auto found = started_.find(param);
      if (param->available() || found == started_.end()) continue;  // named twice
      here.emplace_back(param, found->second->take(*param));
      started_.erase(found);
    }
    take_full(here);
  }

  bool looks_ahead() const override { return true; }
  void leave_out(const std::vector<ShardedParam*>& params) override { schedule_.leave_out(numbers_of(params)); }

  void forget_ahead() override {
    for (const auto& [param, gather] : started_) param->mark_absent();
    started_.clear();
  }

  void drain() override {
    at::NoGradGuard no_grad;
    for (bool open = true; open;) {
      read_notes(true);
      const GatherAct act = schedule_.toward_end();
      if (act.exchange) {
        open = exchange({}, {});
      } else {
        issue(act, /*begun=*/true);
      }
    }
    entries_.clear();
  }

  void refresh(const std::vector<ShardedParam*>& params) override {
    drain();
    for (size_t group = 0; group < ranks_.size(); ++group) refresh_together(*ranks_[group], of_group(params, group));
  }
  bool meet_writes(bool wrote, int64_t) override { return wrote && ranks_.size() == 1 && ranks_[0]->size() == 1; }
  void before_write() override {
    drain();
    forget_ahead();
  }
  void after_write() override {}
  const char* name() const override { return "scheduled collectives"; }

 private:
  // One entry of the order: its parameters from each group, with the notes of all that agree.
  class Gather {
   public:
    void add(std::unique_ptr<StagedGather> part) { parts_.push_back(std::move(part)); }
    at::Tensor take(const ShardedParam& param) {
      for (const auto& part : parts_) {
        const auto& params = part->params();
        if (contains(params, &param)) return part->take(param);
      }
      fail(ErrorKind::kRuntime, "parameter '", param.name(), "' is not in this gather");
    }
    const std::vector<uint8_t>& notes() { return parts_.front()->notes(); }

   private:
    std::vector<std::unique_ptr<StagedGather>> parts_;  // of the first group first
  };
  using GatherPtr = std::shared_ptr<Gather>;

  std::vector<ShardedParam*> of_group(const std::vector<ShardedParam*>& params, size_t group) const {
    std::vector<ShardedParam*> result;
    for (ShardedParam* param : params)
      if (group_of_[index_.at(param)] == group) result.push_back(param);
    return result;
  }

  // Their numbers, ascending, without those that are here or on their way.
  GatherSchedule::Params not_started(const std::vector<ShardedParam*>& params) const {
    GatherSchedule::Params result;
    for (ShardedParam* param : params) {
      if (param->available() || started_.count(param)) continue;
      result.push_back(number_of(param));
    }
    sort_unique(result);
    return result;
  }

  GatherSchedule::Params numbers_of(const std::vector<ShardedParam*>& params) const {
    GatherSchedule::Params result;
    for (const ShardedParam* param : params) result.push_back(number_of(param));
    sort_unique(result);
    return result;
  }

  int32_t number_of(const ShardedParam* param) const {
    const auto found = index_.find(param);
    if (found == index_.end())
      fail(ErrorKind::kRuntime, "parameter '", param->name(), "' does not belong to this engine");
    return found->second;
  }

  void read_notes(bool ending) {
    while (const auto entry = schedule_.due(ending)) {
      schedule_.seen(*entry, entries_[*entry]->notes());
      entries_[*entry].reset();
    }
  }

  void issue(const GatherAct& act, bool begun) {
    const auto made = start_gather(schedule_.entry(act.entry), act.note, begun);
    if (act.note & GatherSchedule::kWanted) keep(made, schedule_.entry(act.entry));
    entries_.resize(act.entry + 1);
    entries_[act.entry] = made;
    schedule_.issued(act);
  }

  // Entries that are wanted soon, as far as nothing has to be waited for.
  void start(const std::vector<ShardedParam*>& ahead) {
    while (!schedule_.due()) {
      const auto act = schedule_.ahead(not_started(ahead));
      if (!act || !here(schedule_.entry(act->entry))) return;
      issue(*act, /*begun=*/false);
    }
  }

  // Their slices are.
  bool here(const GatherSchedule::Params& entry) const {
    return all_of(entry, [&](int32_t index) { return params_[index]->here(); });
  }

  // Everybody says what it wants, everybody helps. False when nobody wanted anything.
  bool exchange(const GatherSchedule::Params& wanted, const GatherSchedule::Params& hints) {
    GatherSchedule::Params wants = wanted;
    append(wants, hints);
    wants.resize(std::min(wants.size(), static_cast<size_t>(kWants)));
    at::Tensor host = at::full({ranks_[0]->size(), kHead + kWants}, -1, at::kInt);
    const uint64_t key = schedule_.left_out_key();
    int32_t* row = host.data_ptr<int32_t>() + ranks_[0]->rank() * (kHead + kWants);
    std::memcpy(row, &key, sizeof(key));
    row[kHead - 1] = static_cast<int32_t>(schedule_.waiting());
    std::copy(wants.begin(), wants.end(), row + kHead);
    if (!wants_.defined())
      wants_ = at::empty_like(host, at::TensorOptions().device(storage::device_for_numbers(buffers_.device())));
    wants_.copy_(host);
    ranks_[0]->all_gather(wants_.select(0, ranks_[0]->rank()), wants_, "what ranks want to gather")->wait();
    ++exchanges_;
    host = wants_.to(at::kCPU);
    GatherSchedule::Params all;
    bool alike = true;
    int32_t waiting = 0;
    for (int64_t rank = 0; rank < host.size(0); ++rank) {
      const int32_t* theirs = host.data_ptr<int32_t>() + rank * (kHead + kWants);
      alike = alike && std::memcmp(theirs, &key, sizeof(key)) == 0;
      waiting = std::max(waiting, theirs[kHead - 1]);
      all.insert(all.end(), theirs + kHead, theirs + kHead + kWants);
    }
    erase_if(all, [](int32_t index) { return index < 0; });
    sort_unique(all);
    if (!all.empty()) keep(start_gather(all, std::nullopt, /*begun=*/true), wants);
    return schedule_.exchanged(all, alike, static_cast<size_t>(waiting));
  }

  // `begun`: the other ranks wait for this one, so they have to be told if it has no memory.
  GatherPtr start_gather(const GatherSchedule::Params& indices, std::optional<uint8_t> note, bool begun) {
    std::vector<ShardedParam*> params;
    for (int32_t index : indices) params.push_back(params_[index].get());
    auto made = std::make_shared<Gather>();
    for (size_t group = 0; group < ranks_.size(); ++group) {
      std::vector<ShardedParam*> part = ranks_.size() == 1 ? std::move(params) : of_group(params, group);
      const bool told = note && group == 0;
      if (part.empty() && !told) continue;
      try {
        auto gather =
            std::make_unique<StagedGather>(*ranks_[group], buffers_, std::move(part), told ? note : std::nullopt);
        collectives_ += gather->collectives();
        made->add(std::move(gather));
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
      ShardedParam* param = params_[index].get();
      if (param->available() || !started_.emplace(param, gather).second) continue;
      gathered_ += param->padded_numel() - param->slice_numel();
      param->mark_inflight();
    }
  }

  std::vector<comm::CommunicatorPtr> ranks_;  // of each group
  std::vector<ShardedParamPtr> params_;
  std::vector<size_t> group_of_;  // of each of them
  std::unordered_map<const ShardedParam*, int32_t> index_;
  GatherSchedule schedule_;
  std::vector<GatherPtr> entries_;  // of this cycle; null once its notes have been read
  std::unordered_map<ShardedParam*, GatherPtr> started_;
  at::Tensor wants_;  // of all ranks in an exchange; kept, so that a rank without memory takes part in the next ones
};

ShardSourcePtr make_scheduled(SourceParts parts) {
  for (GatherGroup& group : parts.groups)  // in one order on all ranks
    if (group.space.open) group.ranks = group.space.open(group.space.axes.shard, plan::Purpose::kGather);
  return scheduled_source(std::move(parts.params), std::move(parts.groups), std::move(parts.storage));
}

const ShardSourceRegistration scheduled_registration({"scheduled collectives", 20, nullptr, &make_scheduled});

}  // namespace

ShardSourcePtr scheduled_source(std::vector<ShardedParamPtr> params, std::vector<GatherGroup> groups,
                                std::shared_ptr<storage::ShardStorage> storage) {
  return std::make_shared<ScheduledSource>(std::move(params), std::move(groups), std::move(storage));
}

}  // namespace ds::zero
