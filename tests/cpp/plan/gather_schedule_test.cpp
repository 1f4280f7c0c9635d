#include "../every_case.h"
#include "plan/gather_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <set>
#include <string>

namespace ds::plan {
namespace {

using Params = GatherSchedule::Params;
using Cycle = std::vector<Params>;  // what a rank wants, one after the other

// A collective as one rank issued it.
struct Issued {
  bool exchange;
  size_t entry;
  Params wants;  // of an exchange; of an entry: its parameters
  uint64_t left_out_key;
  size_t waiting;
  GatherSchedule::Bits entries;  // that the rank has wanted up to an exchange
};

// Whether ranks start entries before they need them: never, all of them alike, or each as it likes.
enum class Early { kNever, kAlike, kEach };

// Ranks that gather by a schedule, without threads: `step` runs one rank until it would wait for another.
class Job {
 public:
  Job(int world, const std::vector<std::vector<Cycle>>& programs, unsigned seed, Early early = Early::kNever)
      : programs_(programs), random_(seed), early_(early) {
    for (int rank = 0; rank < world; ++rank) ranks_.emplace_back();
  }

  // Sets the parameters that each rank leaves out in each of its cycles. A rank hears of them at the begin of the
  // cycle, or at any time in it if `late` is true.
  void leave_out(std::vector<std::vector<Params>> left_out, bool late = false) {
    left_out_ = std::move(left_out);
    late_ = late;
  }

  // Lets ranks run in a random order until all have ended. "" or what went wrong.
  std::string run() {
    while (true) {
      std::vector<size_t> order(ranks_.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = i;
      std::shuffle(order.begin(), order.end(), random_);
      bool moved = false, all_ended = true;
      for (size_t rank : order) {
        const int64_t budget = static_cast<int64_t>(random_() % 7);
        for (int64_t i = 0; i <= budget && step(rank); ++i) moved = true;
        all_ended = all_ended && ended(rank);
        if (!error_.empty()) return error_;
      }
      if (all_ended) return "";
      if (!moved) return "no rank can go on";
    }
  }

  size_t collectives() const { return ranks_[0].log.size(); }
  size_t exchanges() const {
    return static_cast<size_t>(
        std::count_if(ranks_[0].log.begin(), ranks_[0].log.end(), [](const Issued& act) { return act.exchange; }));
  }
  const std::vector<size_t>& ends() const { return ranks_[0].cycle_ends; }
  const std::vector<Issued>& log() const { return ranks_[0].log; }

 private:
  struct Rank {
    GatherSchedule schedule;
    size_t cycle = 0, want = 0;
    bool told = false;               // what it leaves out in this cycle
    std::set<int32_t> started = {};  // under way for this rank, or here
    std::vector<Issued> log = {};    // collectives, in order
    bool in_exchange = false;
    std::vector<size_t> cycle_ends = {};
  };

  bool ended(size_t rank) const { return ranks_[rank].cycle == programs_[rank].size(); }

  bool complete(size_t position) {
    for (const Rank& rank : ranks_)
      if (rank.log.size() <= position) return false;
    const Issued& first = ranks_[0].log[position];
    for (const Rank& rank : ranks_)
      if (rank.log[position].exchange != first.exchange || rank.log[position].entry != first.entry ||
          (!first.exchange && rank.log[position].wants != first.wants))
        error_ = "ranks issued different collectives at position " + std::to_string(position);
    return true;
  }

  bool issue(Rank& rank, const GatherAct& act, const Params& wants) {
    if (act.exchange) {
      rank.log.push_back(
          {true, 0, wants, rank.schedule.left_out_key(), rank.schedule.waiting(), rank.schedule.wanted_entries()});
      rank.in_exchange = true;
      return true;
    }
    for (int32_t param : rank.schedule.entry(act.entry))
      if (act.wanted) rank.started.insert(param);
    const Params params = rank.schedule.entry(act.entry);
    rank.schedule.issued(act);
    rank.log.push_back({false, act.entry, params, 0, 0, {}});
    return true;
  }

  // False: it waits, or it has ended.
  bool step(size_t index) {
    Rank& rank = ranks_[index];
    if (ended(index) || !error_.empty()) return false;
    if (!left_out_.empty() && !rank.told && !rank.in_exchange && (!late_ || random_() % 8 == 0)) {
      rank.schedule.leave_out(left_out_[index][rank.cycle]);
      rank.told = true;
    }
    if (rank.in_exchange) {
      const size_t position = rank.log.size() - 1;
      if (!complete(position)) return false;
      Params wanted;
      bool alike = true;
      size_t waiting = 0;
      GatherSchedule::Bits entries(rank.log[position].entries.size());
      for (const Rank& other : ranks_) {
        wanted.insert(wanted.end(), other.log[position].wants.begin(), other.log[position].wants.end());
        alike = alike && other.log[position].left_out_key == rank.log[position].left_out_key;
        waiting = std::max(waiting, other.log[position].waiting);
        const GatherSchedule::Bits& theirs = other.log[position].entries;
        if (theirs.size() != entries.size()) error_ = "ranks tell of different numbers of entries";
        for (size_t i = 0; i < std::min(entries.size(), theirs.size()); ++i) entries[i] |= theirs[i];
      }
      std::sort(wanted.begin(), wanted.end());
      wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
      for (int32_t param : rank.log[position].wants) rank.started.insert(param);
      rank.in_exchange = false;
      if (!rank.schedule.exchanged(wanted, alike, waiting, entries)) {
        rank.started.clear();
        rank.cycle_ends.push_back(rank.log.size());
        if (rank.want == programs_[index][rank.cycle].size()) {
          ++rank.cycle;
          rank.want = 0;
          rank.told = false;
        }
      }
      return true;
    }
    const Cycle& cycle = programs_[index][rank.cycle];
    const bool ending = rank.want == cycle.size();
    Params missing;
    if (!ending) {
      rank.schedule.needs(cycle[rank.want]);
      std::copy_if(cycle[rank.want].begin(), cycle[rank.want].end(), std::back_inserter(missing),
                   [&](int32_t param) { return !rank.started.count(param); });
    }
    if (!ending && missing.empty()) {
      const bool early = early_ == Early::kEach ? random_() % 2 : early_ == Early::kAlike;
      if (early) {  // what is wanted next is started
        Params soon;
        for (size_t next = rank.want + 1; next < std::min(rank.want + 5, cycle.size()); ++next)
          soon.insert(soon.end(), cycle[next].begin(), cycle[next].end());
        std::sort(soon.begin(), soon.end());
        soon.erase(std::unique(soon.begin(), soon.end()), soon.end());
        if (const auto act = rank.schedule.ahead(without(soon, Params(rank.started.begin(), rank.started.end()))))
          return issue(rank, *act, {});
      }
      // Data must have arrived; then it is used and goes.
      if (!rank.log.empty() && !complete(rank.log.size() - 1)) return false;
      for (int32_t param : cycle[rank.want]) rank.started.erase(param);
      ++rank.want;
      return true;
    }
    if (ending) return issue(rank, rank.schedule.toward_end(), {});
    return issue(rank, rank.schedule.toward(missing), missing);
  }

  std::vector<std::vector<Cycle>> programs_;
  std::vector<Rank> ranks_;
  std::mt19937 random_;
  std::vector<std::vector<Params>> left_out_;
  bool late_ = false;
  Early early_;
  std::string error_;
};

// Forward and backward over `units` layers of two parameters each.
Cycle training(int units) {
  Cycle cycle;
  for (int32_t unit = 0; unit < units; ++unit) cycle.push_back({2 * unit, 2 * unit + 1});
  for (int32_t unit = units - 1; unit >= 0; --unit) cycle.push_back({2 * unit, 2 * unit + 1});
  return cycle;
}

TEST(GatherSchedule, ARepeatingCycleNeedsNoAgreement) {
  for (int world : {1, 2, 3, 8}) {
    const std::vector<std::vector<Cycle>> programs(world, std::vector<Cycle>(5, training(50)));
    Job job(world, programs, 7);
    ASSERT_EQ(job.run(), "");
    ASSERT_EQ(job.ends().size(), 5u);
    EXPECT_EQ(job.ends()[0], 101u);  // an exchange for each unit, and the one that ends the cycle
    for (size_t cycle = 1; cycle < 5; ++cycle) {
      const size_t begin = job.ends()[cycle - 1], end = job.ends()[cycle];
      EXPECT_EQ(end - begin, 101u);
      const auto exchanges = std::count_if(job.log().begin() + static_cast<std::ptrdiff_t>(begin),
                                           job.log().begin() + static_cast<std::ptrdiff_t>(end),
                                           [](const Issued& act) { return act.exchange; });
      EXPECT_EQ(exchanges, 2) << "the first and the last act of a cycle";
    }
  }
}

TEST(GatherSchedule, TheFirstCycleMayGatherMoreAtItsBegin) {
  Cycle first = training(20);
  first.insert(first.begin(), {{100, 101}, {102}});  // parameters that stay from then on
  for (int world : {1, 2, 5}) {
    Job job(world, std::vector<std::vector<Cycle>>(world, {first, training(20), training(20)}), 9);
    ASSERT_EQ(job.run(), "");
    for (size_t cycle : {1, 2}) {
      const auto begin = job.log().begin() + static_cast<std::ptrdiff_t>(job.ends()[cycle - 1]);
      const auto end = job.log().begin() + static_cast<std::ptrdiff_t>(job.ends()[cycle]);
      EXPECT_EQ(end - begin, 41);
      EXPECT_EQ(std::count_if(begin, end, [](const Issued& act) { return act.exchange; }), 2) << "cycle " << cycle;
    }
  }
}

TEST(GatherSchedule, AnEndWithoutGathersCostsOneExchange) {
  std::vector<Cycle> program{training(3), {}, training(3), {}, {}};
  Job job(2, {program, program}, 1);
  ASSERT_EQ(job.run(), "");
  EXPECT_EQ(job.ends(), (std::vector<size_t>{7, 8, 15, 16, 17}));
}

TEST(GatherSchedule, WhoSkipsServesAndWhatNobodyWantsIsLeftOut) {
  Cycle whole = training(4), shorter = whole;
  shorter.erase(shorter.begin() + 4);  // the last unit stays for backward
  // Rank 1 alone skips: rank 0 still gets everything.
  Job one(2, {{whole, whole, whole}, {whole, shorter, shorter}}, 3);
  ASSERT_EQ(one.run(), "");
  EXPECT_EQ(one.ends()[2] - one.ends()[1], 9u);
  // Both skip: served once, then gone.
  Job both(2, {{whole, shorter, shorter}, {whole, shorter, shorter}}, 3);
  ASSERT_EQ(both.run(), "");
  EXPECT_EQ(both.ends()[1] - both.ends()[0], 9u);
  EXPECT_EQ(both.ends()[2] - both.ends()[1], 8u);
}

TEST(GatherSchedule, AnExceptionDoesNotChangeTheScheduleButTheSameTwiceDoes) {
  Cycle other = training(4);
  other.insert(other.begin() + 2, {100});
  const auto exchanges_of_last = [](const std::vector<Cycle>& program) {
    Job job(2, {program, program}, 5);
    EXPECT_EQ(job.run(), "");
    const size_t begin = job.ends()[job.ends().size() - 2];
    return std::count_if(job.log().begin() + static_cast<std::ptrdiff_t>(begin), job.log().end(),
                         [](const Issued& act) { return act.exchange; });
  };
  const Cycle usual = training(4);
  EXPECT_EQ(exchanges_of_last({usual, usual, other, usual}), 2);
  EXPECT_EQ(exchanges_of_last({usual, usual, other, other, other}), 2);
  // Three in a row that are all different: exchanges until a cycle comes twice.
  Cycle third = usual, fourth = usual;
  third.insert(third.begin() + 1, {101});
  fourth.insert(fourth.begin() + 3, {102});
  EXPECT_GT(exchanges_of_last({usual, other, third, fourth, usual}), 4);
  EXPECT_EQ(exchanges_of_last({usual, other, third, fourth, usual, usual, usual}), 2);
}

// Units that cycles of a training leave out at random, never the first and the last one; none in the first `whole`
// cycles.
std::vector<Params> dropped(int units, int cycles, int whole, double chance, std::mt19937& random) {
  std::vector<Params> result(cycles);
  for (int cycle = whole; cycle < cycles; ++cycle)
    for (int32_t unit = 1; unit + 1 < units; ++unit)
      if (static_cast<double>(random() % 1000) < 1000 * chance)
        for (int32_t param : {2 * unit, 2 * unit + 1}) result[cycle].push_back(param);
  return result;
}

std::vector<Cycle> without_units(int units, const std::vector<Params>& left_out) {
  std::vector<Cycle> cycles;
  for (const Params& params : left_out) {
    cycles.emplace_back();
    for (const Params& unit : training(units))
      if (without(unit, params) == unit) cycles.back().push_back(unit);
  }
  return cycles;
}

struct OfCycle {
  size_t gathers = 0, exchanges = 0;  // of units
  std::set<int32_t> params = {};      // gathered
};

std::vector<OfCycle> cycles_of(const Job& job) {
  std::vector<OfCycle> result;
  size_t at = 0;
  for (size_t end : job.ends()) {
    OfCycle cycle;
    for (; at < end; ++at) {
      const Issued& act = job.log()[at];
      cycle.exchanges += act.exchange ? 1 : 0;
      cycle.gathers += act.wants.empty() ? 0 : 1;
      cycle.params.insert(act.wants.begin(), act.wants.end());
    }
    result.push_back(cycle);
  }
  return result;
}

TEST(GatherSchedule, WhatAllRanksLeaveOutIsNeitherGatheredNorAskedFor) {
  std::mt19937 random(5);
  for (int world : {1, 2, 5}) {
    for (double chance : {0.2, 0.5, 1.0}) {
      const auto left_out = dropped(12, 30, 1, chance, random);
      const auto program = without_units(12, left_out);
      Job job(world, std::vector<std::vector<Cycle>>(world, program), static_cast<unsigned>(random()), Early::kAlike);
      job.leave_out(std::vector<std::vector<Params>>(world, left_out));
      ASSERT_EQ(job.run(), "");
      const auto cycles = cycles_of(job);
      ASSERT_EQ(cycles.size(), 30u);
      for (size_t cycle = 1; cycle < cycles.size(); ++cycle) {
        EXPECT_EQ(cycles[cycle].exchanges, 2u) << "cycle " << cycle;
        EXPECT_EQ(cycles[cycle].gathers, program[cycle].size()) << "cycle " << cycle;
        for (int32_t param : left_out[cycle]) EXPECT_EQ(cycles[cycle].params.count(param), 0u) << "cycle " << cycle;
      }
    }
  }
}

// A run that was resumed: its first cycle leaves out some of the units.
TEST(GatherSchedule, WhatWasLeftOutUpToNowGetsItsPlaceWhenItComes) {
  std::mt19937 random(6);
  for (int run = 0; run < 50; ++run) {
    const auto left_out = dropped(12, 30, 0, 0.5, random);
    const auto program = without_units(12, left_out);
    Job job(2, {program, program}, static_cast<unsigned>(random()), run % 2 ? Early::kNever : Early::kAlike);
    job.leave_out({left_out, left_out});
    ASSERT_EQ(job.run(), "");
    const auto cycles = cycles_of(job);
    Params unseen = left_out[0];
    for (size_t cycle = 1; cycle < cycles.size(); ++cycle) {
      const bool all_known = without(unseen, left_out[cycle]).empty();
      EXPECT_EQ(cycles[cycle].exchanges == 2, all_known) << "run " << run << ", cycle " << cycle;
      // A rank that needs what the schedule does not have serves the rest of it.
      EXPECT_LE(cycles[cycle].gathers, program[cycle].size() + (all_known ? 0 : training(12).size()));
      unseen = common(unseen, left_out[cycle]);
    }
  }
}

TEST(GatherSchedule, RanksThatLeaveOutDifferentUnitsServeEachOther) {
  std::mt19937 random(7);
  const auto left_out = dropped(8, 12, 1, 0.5, random);
  const auto program = without_units(8, left_out);
  auto other = left_out;
  other[5] = Params{2, 3};
  auto others = without_units(8, other);
  ASSERT_NE(other[5], left_out[5]);
  Job job(2, {program, others}, 8);
  job.leave_out({left_out, other});
  ASSERT_EQ(job.run(), "");
  const auto cycles = cycles_of(job);
  EXPECT_EQ(cycles[5].gathers, training(8).size()) << "the whole schedule";
  for (size_t cycle : {4, 6, 7, 11}) {
    EXPECT_EQ(cycles[cycle].exchanges, 2u) << "cycle " << cycle;
    EXPECT_EQ(cycles[cycle].gathers, program[cycle].size()) << "cycle " << cycle;
  }
}

// A unit of which a part is left out, and a unit that runs though it was to be left out.
TEST(GatherSchedule, PartsOfUnitsAndUnitsThatRunAllTheSame) {
  const Cycle whole = training(4);
  Cycle half = whole;
  half[1] = half[6] = {3};
  const std::vector<Cycle> parts{whole, half, whole, half};
  Job job(2, {parts, parts}, 9);
  const std::vector<Params> first{{}, {2}, {}, {2}};
  job.leave_out({first, first});
  ASSERT_EQ(job.run(), "");
  for (int cycle : {1, 2, 3}) {
    EXPECT_EQ(cycles_of(job)[cycle].exchanges, 2u);
    EXPECT_EQ(cycles_of(job)[cycle].gathers, 8u);
    EXPECT_EQ(cycles_of(job)[cycle].params.count(2), cycle == 2 ? 1u : 0u);
  }
  const std::vector<Cycle> all(6, whole);
  Job runs(2, {all, all}, 9);
  const std::vector<Params> named{{}, {2, 3}, {}, {4, 5}, {}, {}};
  runs.leave_out({named, named});
  ASSERT_EQ(runs.run(), "");
  EXPECT_GT(cycles_of(runs)[1].exchanges, 2u);
  for (int cycle : {2, 4, 5}) EXPECT_EQ(cycles_of(runs)[cycle].exchanges, 2u) << "cycle " << cycle;
}

// Every rank with a program of its own: all of them end, and all issue the same collectives.
TEST(GatherSchedule, RandomBranchesOnEveryRankNeverHang) {
  const int cases = every_case() ? 20000 : 3000;
  std::mt19937 random(11);
  for (int which = 0; which < cases; ++which) {
    const int world = 1 + static_cast<int>(random() % 5);
    const int units = 1 + static_cast<int>(random() % 6), cycles = 1 + static_cast<int>(random() % 8);
    const double chance = std::vector<double>{0.0, 0.02, 0.2, 0.6}[random() % 4];
    const auto happens = [&] { return static_cast<double>(random() % 1000) < 1000 * chance; };
    std::vector<std::vector<Cycle>> programs(world);
    std::vector<std::vector<Params>> left_out(world, dropped(units, cycles, 0, chance, random));
    std::vector<bool> empty;
    for (int cycle = 0; cycle < cycles; ++cycle) empty.push_back(random() % 5 == 0);
    for (auto& program : programs) {
      for (int cycle = 0; cycle < cycles; ++cycle) {
        Cycle wants;
        for (const Params& unit : empty[cycle] ? Cycle{} : training(units)) {
          if (happens()) continue;
          wants.push_back(unit);
          if (happens()) wants.push_back({static_cast<int32_t>(random() % 20)});
        }
        if (happens()) std::reverse(wants.begin(), wants.end());
        if (happens()) left_out[&program - programs.data()][cycle] = {static_cast<int32_t>(random() % 20)};
        if (happens()) wants.clear();
        program.push_back(wants);
      }
    }
    Job job(world, programs, static_cast<unsigned>(random()), which % 2 ? Early::kNever : Early::kEach);
    if (which % 3 != 0) job.leave_out(left_out, which % 3 == 1);
    ASSERT_EQ(job.run(), "") << "case " << which << ", world " << world;
    EXPECT_EQ(job.ends().size(), static_cast<size_t>(cycles));
  }
}

}  // namespace
}  // namespace ds::plan
