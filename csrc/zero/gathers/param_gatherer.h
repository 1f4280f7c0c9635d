// Gathers sharded parameters when a module runs, forward and backward, and releases them after.
//
// [Note: uses]
// A *unit* is the parameters of one module that are gathered together. Each call of the module is a *use* of it: it
// holds the parameters from the module's start to its end, and once more during its part of backward, from the first
// gradient of an output to the last gradient of an input (or, where no input needs one, to the end of the backward that
// is running, which is a short one when re-entrant checkpointing recomputes a segment). A parameter
// without holders may be released; whoever needs it again fetches it again. So a module that is called three times, a
// parameter shared by two modules and a module that is recomputed in backward need no rules of their own.
//
// [Note: the trace is a hint]
// The order of uses in the last backward-ended cycle tells how soon a parameter is wanted again. It decides only
// whether to keep it; a rank that takes another branch finds parameters by fetching them. Units that the cycle has left
// out keep their places (plan/learned_order.h): what is kept does not depend on what other cycles leave out.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/step_clock.h"
#include "zero/gathers/shard_source.h"
#include "zero/gathers/slice_copier.h"
#include "zero/rank_failures.h"
#include "zero/spaces/sharded_param.h"

namespace ds::zero {

// Without values nothing is limited, and no parameter stays gathered.
struct GathererOptions {
  int64_t max_live_numel = INT64_MAX;   // elements that may be gathered at one time, as far as they are optional
  int64_t max_reuse_numel = INT64_MAX;  // a parameter used again within this many elements is not released
  int64_t persistence_numel = 0;        // parameters with fewer elements stay gathered
  int64_t model_persistence_numel = INT64_MAX;  // elements that may stay gathered in all
  // Elements fetched ahead, where fetching takes waiting: the last unit of them may exceed it.
  int64_t prefetch_numel = INT64_MAX;
  // Writes of the user into gathered values are kept until the engine's slices have taken it (UserWrites).
  bool keeps_writes = false;
  // A slice of this rank could not be read: the other ranks wait for it, and are told.
  RankFailures::Tell on_failure = [](const std::exception&) {};
  StepClockPtr clock = std::make_shared<StepClock>();  // of the engine
};

class ParamGatherer {
 public:
  ParamGatherer(std::vector<ShardedParamPtr> params, ShardSourcePtr source, GathererOptions options);
  ~ParamGatherer();

  // Units, made while the engine is built or when a module turns out to use a parameter that is not its own.
  // `block`: the unit that has these parameters, too, and whose call has the calls of this one in it, as a rule; -1:
  // there is none.
  int32_t add_unit(std::string name, std::vector<ShardedParamPtr> params, int32_t block = -1);
  void extend_unit(int32_t unit, ShardedParamPtr param);

  // Whether a call that is running has the parameters of the unit: its own call needs neither enter() nor leave().
  bool covers(int32_t unit) const;
  // Around a call of the module. leave() with the outputs of the module that need gradients.
  void enter(int32_t unit, const std::vector<at::Tensor>& inputs);
  void leave(int32_t unit, const std::vector<at::Tensor>& outputs);

  // Around a call of the whole model: forgets what calls that raised have left behind.
  void begin_forward();
  void end_forward(const std::vector<at::Tensor>& outputs);
  void abandon_forward();  // it raised
  void end_backward();     // also when it raised

  // A released parameter was touched. Inside a call of the model: gathered, for that call and its backward; true.
  bool touch(ShardedParam& param);

  // The model does not use `params` until the next call, as far as the caller knows: a module is not a reason to gather
  // them, and nothing fetches them ahead. One that is touched all the same is gathered then.
  // All ranks name the same ones.
  void leave_out(const std::vector<ShardedParam*>& params);

  // For as long as a caller wants it: the values of the slices.
  void acquire(const std::vector<ShardedParam*>& params);
  void release(const std::vector<ShardedParam*>& params);

  // The user has written into the gathered values, and the slices have not taken it. No communication.
  bool written(ShardedParam& param);
  void forget_written(ShardedParam& param);  // it is not kept any more
  void before_slice_write();                 // by the user, to a slice of this rank

  void mark_persistent();  // by size
  // Around a change of the slices, which every rank makes. `renew`: second copies of the slices take the change now,
  // and not when a forward begins.
  void before_change() {
    settle_copies();
    source_->before_write();
  }
  void after_change(bool renew) {
    publish(renew);
    refresh_persistent(copies_ && copies_->stale() ? Values::kExact : Values::kUsed);
  }
  // The same where gathered values stay as they are: the user may have written into them.
  void publish(bool renew);
  void settle_copies() const {  // nobody reads slices for them any more
    if (copies_) copies_->finish();
  }
  // Copies of the slices that are gathered instead of them, of which the engine is the owner.
  void use_copies(SliceCopierPtr copies) { copies_ = std::move(copies); }
  const SliceCopierPtr& copies() const { return copies_; }
  void use_source(ShardSourcePtr source);                 // between two forwards, on all ranks
  int64_t publications() const { return publications_; }  // calls of ShardSource::after_write
  void release_all();                                     // everything that has no holder
  void drain();                                           // ShardSource::drain
  ShardSource& source() { return *source_; }
  const std::vector<ShardedParamPtr>& params() const { return params_; }

  int64_t max_live_numel() const { return options_.max_live_numel; }
  int64_t live_numel() const { return live_; }
  int64_t peak_live_numel() const { return peak_live_; }
  void reset_peak() { peak_live_ = live_; }
  int64_t fetches() const { return fetches_; }

 private:
  struct Use {
    int32_t unit;
    std::vector<ShardedParam*> params;
    int inputs = 0, open_inputs = 0;  // that tell the end of its part of backward
    bool held = false;                // by that part
    int64_t entered_at = 0;           // events_ when the call began
  };
  using UsePtr = std::shared_ptr<Use>;
  struct Unit {
    std::string name;
    std::vector<ShardedParam*> params;
    int64_t numel = 0;
    int32_t block = -1;
  };

  // Runs what needs the slices of all ranks.
  template <typename Body>
  void with_slices(const Body& body) const {
    const InPhase waiting(*options_.clock, Phase::kGathers);
    RankFailures(options_.on_failure).guard(body);
  }
  void hold(const std::vector<ShardedParam*>& params, bool ahead = true, Values values = Values::kUsed);
  void let_go(const std::vector<ShardedParam*>& params, bool keep);
  void drop(ShardedParam& param);
  void meet_writes();
  void refresh_persistent(Values values = Values::kUsed);  // after the shards have changed
  void need_copies();                                      // they have what slices have
  void refresh_unwritten();
  void note(int32_t unit);
  void learn_trace();
  bool left_out(const Unit& unit) const;
  void allow_pool(const Unit& unit);
  bool wanted_soon(int32_t unit) const;
  std::vector<ShardedParam*> wanted_next() const;
  void start_backward_use(const UsePtr& use);
  void end_backward_use(const UsePtr& use);
  void hook_outputs(const UsePtr& use, const std::vector<at::Tensor>& outputs);
  void hold_all();
  void let_go_kept();
  void reset_uses();
  void forget_saved_again();

  std::vector<ShardedParamPtr> params_;
  std::unordered_set<const ShardedParam*> left_out_;
  ShardSourcePtr source_;
  SliceCopierPtr copies_;  // null: slices are gathered themselves
  GathererOptions options_;
  std::vector<Unit> units_;
  std::vector<UsePtr> running_;   // calls of modules that have not ended, innermost last
  std::vector<UsePtr> backward_;  // uses that hold parameters in backward
  UsePtr whole_;                  // the call of the model itself: holds what was touched outside of all units
  // Params of the call of the model that has ended, until its backward has, or the next forward begins.
  std::vector<ShardedParam*> kept_;
  // Parameters that the model has used outside of all units, such as the weight of an embedding in its head: a unit
  // that uses them before does not end their use.
  std::unordered_set<const ShardedParam*> used_outside_;
  bool in_forward_ = false;
  int64_t forwards_ = 0;
  int64_t events_ = 0;  // starts and ends of backward parts
  // Held from a backward with create_graph, inside forward or not, to the next step: several backwards may use its
  // graph.
  std::vector<ShardedParam*> saved_again_;
  bool creates_graph_ = false;
  std::vector<int32_t> trace_, recording_;
  std::vector<int32_t> unseen_;  // units that the trace lacks because each cycle up to now has left them out
  size_t cursor_ = 0, recorded_before_ = 0;
  bool evaluated_ = false;  // trace_ is of an evaluation
  bool offloaded_ = false;  // slices rest elsewhere
  int64_t live_ = 0, peak_live_ = 0, fetches_ = 0, publications_ = 0;
  std::shared_ptr<bool> alive_;  // hooks outlive the gatherer
};

}  // namespace ds::zero
