// In which order ranks gather sharded parameters together, without asking each other before every gather.
//
// [Note: how ranks stay together]
// A *cycle* goes from the end of one end-of-cycle exchange to the end of the next: a backward, or the like. Its first
// act is an exchange: every rank says what it wants or that it wants nothing, and the union is gathered with
// everybody's help. Where the union is the first entry of the schedule that was learned from an earlier cycle, all
// ranks go on with that schedule. (The first cycle also gathers what stays from then on, such as small parameters. A
// schedule that no second cycle has confirmed may therefore be entered at a later entry.) An entry is one collective,
// issued by each rank when it gets there, and says nothing of the other ranks: nobody waits for it but with the values.
// A rank that needs a later entry *serves* those before it: gathers and drops. A rank that needs parameters that the
// rest of the schedule does not have serves all of it, and says what it needs in the exchange behind it. A rank that is
// through serves the rest, too, and then goes on with exchanges until nobody wants anything: that ends the cycle. These
// exchanges also tell which entries some rank has wanted.
//
// [Note: parameters that are left out]
// All ranks may know that a cycle does not use some parameters: layers that progressive layer dropping leaves out. The
// schedule of this cycle is the learned one without them: nobody gathers them, and nobody has to be asked. They keep
// their places for later cycles (plan/learned_order.h). The exchanges that open and end the cycle show whether all
// ranks name the same parameters. Where they do not, the cycle leaves out none, and nothing is learned from it.
//
// Everything here follows from what all ranks have seen, in the same order; no clock, no tensor, no communication.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "plan/learned_order.h"

namespace ds::plan {

struct GatherAct {
  bool exchange;  // else: entry `entry` of the schedule
  size_t entry;
  bool wanted;         // by this rank; an entry that is not is served
  bool early = false;  // this rank does not need the entry yet
};

class GatherSchedule {
 public:
  using Params = LearnedOrder::Numbers;  // numbers of parameters, alike on all ranks; ascending
  using Bits = std::vector<uint32_t>;    // of entries of the schedule, by their number

  // No cycle that begins from now on uses `params`, as far as this rank knows. The other ranks call it, too.
  void leave_out(Params params) { asked_ = std::move(params); }
  // Goes along with each exchange: equal where ranks have named the same parameters.
  uint64_t left_out_key() const;
  // This rank needs `params` now. Entries that were started ahead() and are not needed yet wait: their number goes
  // along with each exchange, too.
  void needs(const Params& params);
  size_t waiting() const { return early_.size(); }

  // The next act of this rank on its way to `missing` (not empty): what it waits for and has not started.
  GatherAct toward(const Params& missing) const;
  // The same on its way to the end of the cycle.
  GatherAct toward_end() const;
  // The next entry, where all of it is in `soon`: this rank may start it before it is needed.
  std::optional<GatherAct> ahead(const Params& soon) const;

  void issued(const GatherAct& act);  // an entry
  // The entries of this cycle that this rank has wanted. They go along with each exchange; their number of words is
  // equal on all ranks.
  const Bits& wanted_entries() const { return wanted_; }
  // An exchange is over: `wanted` is the union of all ranks; `alike`: their keys are equal; `waiting`: the largest
  // number; `entries`: those that some rank has wanted. False: the cycle is over, too, and the next one begins.
  bool exchanged(const Params& wanted, bool alike, size_t waiting, const Bits& entries);

  const Params& entry(size_t index) const { return current_.at(index); }  // of this cycle
  // Whether an exchange may name what is only wanted soon: not while a schedule is being learned.
  bool hints() const { return open_ && !trusted_; }

 private:
  bool on_schedule() const { return open_ && following_ && cursor_ < current_.size(); }
  bool is_wanted(size_t entry) const { return (wanted_[entry / 32] >> (entry % 32) & 1) != 0; }
  void open(const Params& wanted, bool alike);
  void close();
  void keep_wanted();
  LearnedOrder run() const;
  void learn(LearnedOrder run);

  static constexpr size_t kLongest = 65536;  // entries of a cycle that can be learned
  static constexpr int kMaxDivergences = 3;  // diverging cycles in a row after which exchanges are cheaper

  LearnedOrder schedule_;
  bool trusted_ = true;                    // the schedule is followed where its first entry fits
  bool confirmed_ = false;                 // more than one cycle has made the schedule
  int divergences_ = 0;                    // cycles in a row
  std::optional<LearnedOrder> candidate_;  // the gathers of the last diverging cycle
  Params asked_;                           // what the next cycle leaves out

  // The cycle that runs.
  std::vector<Params> current_;  // the schedule without what is left out
  std::vector<size_t> places_;   // in the schedule, of each entry of `current_`
  Params left_out_;
  bool steady_ = true;           // the ranks have left out the same parameters, from its begin to its end
  bool open_ = false;            // somebody has wanted something
  bool following_ = false;       // the first exchange was the schedule's first entry
  size_t cursor_ = 0;            // entries issued
  Bits wanted_;                  // entries that this rank has wanted; at the end of the cycle: that some rank has
  std::vector<Params> agreed_;   // by exchanges, in order; the first one opened the cycle
  std::vector<Params> early_;    // entries that this rank has started and does not need yet
  std::vector<size_t> waiting_;  // at each of `agreed_`
};

}  // namespace ds::plan
