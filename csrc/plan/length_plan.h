// The longest sequence that fits: peak bytes against length, from samples of a few lengths. Integers only.
//
// The memory of a step grows with the length like a polynomial of second degree: states do not grow, activations grow
// with it, scores of attention that are there as a whole with its square. So the peak of each *moment* of the step
// (forward of a layer, its backward, the loss) at three lengths gives that of every length, and the peak of the step is
// that of the largest moment: at a length that was never tried another moment may be it.
//
// If memory grows in another way (a buffer that is full from some length on, a cache that begins at another), no
// polynomial goes through all lengths. Hence more samples than three: each length belongs to the polynomial through its
// neighbours, and a further sample tells how far off the one that goes on from the last three is.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ds::plan {

struct LengthSample {
  int64_t length;                             // tokens of the whole sequence
  std::vector<std::vector<int64_t>> moments;  // bytes, by moment and part
};

class LengthCurve {
 public:
  // Three samples or more, of rising lengths, with the same moments and parts. Between two of them two polynomials go
  // through both, with the sample before and with the one behind; the larger counts, since a bend lies on one side and
  // too little would end a run. Below the second sample: through the first three; above the last: through the last
  // three. Throws ErrorKind::kValue for others.
  explicit LengthCurve(std::vector<LengthSample> samples);

  // By part, at the largest moment; never below zero.
  std::vector<int64_t> parts(int64_t length) const;
  int64_t peak(int64_t length) const;
  int64_t moment(int64_t length) const;  // the number of the largest one

  // The error of peak() at a sample that does not belong to this curve, in thousandths of the peak that was found
  // there, rounded up. Throws ErrorKind::kValue where the sample has other parts.
  int64_t miss(const LengthSample& found) const;

  // The longest length with peak() <= memory that is a multiple of `step`, at most `limit`; 0: not even one step.
  // Assumes that longer ones need more.
  int64_t longest(int64_t memory, int64_t step, int64_t limit) const;

 private:
  int64_t at(size_t moment, size_t part, int64_t length) const;
  int64_t through(size_t from, size_t moment, size_t part, int64_t length) const;
  void check_like_first(const LengthSample& sample) const;
  std::vector<LengthSample> samples_;  // by length
};

// `longest[i]` is the longest sequence that fits with choice i; choices are sorted by cost. Returns the first one that
// fits at least `gain_percent` more than `now`, or -1.
int64_t cheapest_step(const std::vector<int64_t>& longest, int64_t now, int64_t gain_percent);

}  // namespace ds::plan
