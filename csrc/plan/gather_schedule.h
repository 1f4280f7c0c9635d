// In which order ranks gather sharded parameters together, without asking each other before every gather.
//
// [Note: how ranks stay together]
// A *cycle* goes from the end of one end-of-cycle exchange to the end of the next: a backward, or the like. Its first
// act is an exchange: every rank says what it wants or that it wants nothing, and the union is gathered with
// everybody's help. Where the union is the first entry of the schedule that was learned from an earlier cycle, all
// ranks go on with that schedule: an entry is one collective, issued by each rank when it gets there, and carries one
// note of each rank. A rank that needs a later entry *serves* those before it: gathers and drops. A rank that needs
// parameters that the rest of the schedule does not have says so in its next note. Everybody has read the notes of
// entry k before it issues entry k + lag, so all leave the schedule at the same entry, and agree by exchanges from
// there to the end of the cycle. A rank that is through serves the rest, and then goes on with exchanges until nobody
// wants anything: that ends the cycle.
//
// Everything here follows from what all ranks have seen, in the same order; no clock, no tensor, no communication.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace ds::plan {

struct GatherAct {
  bool exchange;  // else: entry `entry` of the schedule
  size_t entry;
  uint8_t note;  // this rank's, to go with the entry: GatherSchedule::kWanted, kDiverged, or neither
};

class GatherSchedule {
 public:
  using Params = std::vector<int32_t>;  // numbers of parameters, alike on all ranks; ascending
  static constexpr uint8_t kWanted = 1, kDiverged = 2;

  // Notes are read at most `lag` entries late (at least 1): that is the number of gathers that may be under way at one
  // time.
  explicit GatherSchedule(int lag) : lag_(static_cast<size_t>(lag)) {}

  // The next act of this rank on its way to `missing` (not empty): what it waits for and has not started.
  GatherAct toward(const Params& missing) const;
  // The same on its way to the end of the cycle.
  GatherAct toward_end() const;
  // The next entry, where all of it is in `soon`: this rank may start it before it is needed.
  std::optional<GatherAct> ahead(const Params& soon) const;

  // The entry whose notes have to be seen() before the next act; none: go on. `ending`: before the act of toward_end.
  std::optional<size_t> due(bool ending = false) const;
  void seen(size_t entry, const std::vector<uint8_t>& notes);  // one of each rank
  void issued(const GatherAct& act);                           // an entry
  // An exchange is over: `wanted` is the union of all ranks. False: the cycle is over, too, and the next one begins.
  bool exchanged(const Params& wanted);

  const Params& entry(size_t index) const { return schedule_.at(index); }
  size_t entries() const { return schedule_.size(); }
  // Whether an exchange may name what is only wanted soon: not while a schedule is being learned.
  bool hints() const { return open_ && !trusted_; }

 private:
  bool on_schedule() const { return open_ && following_ && cursor_ < end(); }
  size_t end() const;
  void close();
  void learn(std::vector<Params> next, bool diverged);

  static constexpr size_t kLongest = 65536;  // entries of a cycle that can be learned
  static constexpr int kMaxDivergences = 3;  // diverging cycles in a row after which exchanges are cheaper

  size_t lag_;
  std::vector<Params> schedule_;
  bool trusted_ = true;            // the schedule is followed where its first entry fits
  int divergences_ = 0;            // cycles in a row
  std::vector<Params> candidate_;  // the gathers of the last diverging cycle

  // Of the cycle that runs.
  bool open_ = false;           // somebody has wanted something
  bool following_ = false;      // the first exchange was the schedule's first entry
  size_t cursor_ = 0;           // entries issued
  size_t read_ = 0;             // entries whose notes have been seen
  std::optional<size_t> turn_;  // the schedule ends here: somebody diverged
  std::vector<bool> wanted_;    // of each entry issued: by anybody
  std::vector<Params> agreed_;  // by exchanges, in order; the first one opened the cycle
};

}  // namespace ds::plan
