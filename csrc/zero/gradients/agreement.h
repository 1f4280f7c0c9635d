// Numbers that all ranks must have alike although scripts may change them while they train: the hyperparameters of
// parameter groups, clipping, accumulation, and what was written into parameters whose slices have not taken it yet.
//
// A fingerprint of them travels with the flags at the end of a reducing backward: each of its bits is a float, and the
// sum over the ranks is 0 or their number where all have the same. Names and values travel only where it differs.
#pragma once
#include <array>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "zero/spaces/space_ranks.h"

namespace ds::zero {

class Agreement {
 public:
  using Bits = std::array<float, 65>;  // the last one counts the ranks

  using Numbers = std::vector<std::pair<std::string, double>>;

  // `values`: others, asked for at each exchange. With `all` those that are 0 are among them, so that all ranks have the
  // same names.
  void ask(std::function<Numbers(bool all)> values) { values_ = std::move(values); }
  // This rank's from now on, equally many names and numbers; `rank`: its number among all of the job.
  void tell(int rank, std::vector<std::string> names, std::vector<double> numbers);
  Bits bits() const;
  static bool agrees(const Bits& sums);
  // The numbers that differ, with their ranks. Every rank calls it.
  std::string difference(const SpaceRanks& ranks, const c10::Device& device) const;
  [[noreturn]] void refuse(const SpaceRanks& ranks, const c10::Device& device, const std::string& more = {}) const;
  // The same apart from a backward: fails on every rank where they do not agree. Every rank calls it.
  void meet(const SpaceRanks& ranks, const c10::Device& device) const;

 private:
  std::function<Numbers(bool)> values_ = [](bool) { return Numbers(); };
  int rank_ = 0;
  std::vector<std::string> names_;
  std::vector<double> numbers_;
};

}  // namespace ds::zero
