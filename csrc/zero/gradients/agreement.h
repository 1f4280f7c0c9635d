// Numbers that all ranks must have alike although scripts may change them while they train: the hyperparameters of
// parameter groups, clipping, accumulation.
//
// A fingerprint of them travels with the flags at the end of a reducing backward: each of its bits is a float, and the
// sum over the ranks is 0 or their number where all have the same. Names and values travel only where it differs.
#pragma once
#include <array>
#include <cstddef>
#include <string>
#include <vector>

#include "zero/spaces/space_ranks.h"

namespace ds::zero {

class Agreement {
 public:
  using Bits = std::array<float, 65>;  // the last one counts the ranks

  // This rank's from now on, equally many names and numbers; `rank`: its number among all of the job.
  void tell(int rank, std::vector<std::string> names, std::vector<double> numbers);
  Bits bits() const;
  static bool agrees(const Bits& sums);
  // Which numbers differ, and on which ranks. Every rank calls it.
  std::string difference(const SpaceRanks& ranks, const c10::Device& device) const;

 private:
  int rank_ = 0;
  std::vector<std::string> names_;
  std::vector<double> numbers_;
};

}  // namespace ds::zero
