// Counts the gradients of each parameter in one backward.
//
// [Note: last use]
// A parameter may fire several times in one backward (re-entrant checkpointing of a shared module; [Note: one use] says
// what counts as once), so a bucket must not leave before the *last* one. How often each parameter fires is learned by
// counting: the first backward reduces nothing before its end, later ones launch a bucket when all its parameters have
// fired as often as ever before. One that fires once more than that, after its bucket has left, is late: its gradient
// is kept aside, all ranks learn of it with the flags of the backward's end, and a second round adds it. Correct
// always, fast when the model is regular.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/error.h"
#include "base/ranges.h"

namespace ds::zero {

class GradUseCounter {
 public:
  explicit GradUseCounter(size_t params) : fires_(params), expected_(params), left_out_(params) {}

  void begin() { fill(fires_, 0); }
  int32_t fired(size_t param) { return ++fires_[param]; }
  bool any() const {
    return any_of(fires_, [](int32_t n) { return n > 0; });
  }
  int32_t expected(size_t param) const { return expected_[param]; }  // the most in an earlier one
  // Number of times that it will have fired when its bucket may leave; nothing is known: 1 where buckets are `eager`,
  // else 0.
  int32_t wanted(size_t param, bool eager) const {
    if (left_out_[param]) return 0;
    return learned_ ? expected_[param] : eager;
  }

  // The caller knows that `params` will not fire, until the next call. One that fires all the same may be late.
  void leave_out(const std::vector<size_t>& params) {
    fill(left_out_, 0);
    for (size_t param : params) left_out_.at(param) = 1;
  }

  void learn() {  // the backward has ended
    for (size_t param = 0; param < fires_.size(); ++param) expected_[param] = std::max(expected_[param], fires_[param]);
    learned_ = true;
  }
  bool has_learned() const { return learned_; }
  void forget_last(bool had_learned) { learned_ = had_learned; }  // an empty backward teaches nothing

  // The learned counts, for a run that is resumed later: empty before the first backward. A sum is rounded differently
  // when a gradient comes late, so a resumed run that has to learn again would not have the same bits.
  std::vector<int32_t> learned() const { return learned_ ? expected_ : std::vector<int32_t>(); }
  void set_learned(const std::vector<int32_t>& expected) {
    if (!expected.empty() && expected.size() != fires_.size())
      fail(ErrorKind::kValue, "what was learned of ", expected.size(), " parameters is not of these ", fires_.size());
    learned_ = !expected.empty();
    expected_ = learned_ ? expected : std::vector<int32_t>(fires_.size());
  }

 private:
  std::vector<int32_t> fires_, expected_;
  std::vector<uint8_t> left_out_;
  bool learned_ = false;  // expected_ rests on at least one backward
};

}  // namespace ds::zero
