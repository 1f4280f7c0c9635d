#include "plan/sequence_cut.h"

#include <algorithm>

#include "base/error.h"
#include "base/sizes.h"

namespace ds::plan {

SequenceCut::SequenceCut(std::vector<int64_t> tokens, std::vector<std::vector<HeadRun>> heads)
    : tokens_(std::move(tokens)), starts_{0}, heads_(std::move(heads)) {
  for (const int64_t count : tokens_) {
    if (count < 0) fail(ErrorKind::kValue, "a part of a sequence with ", count, " tokens");
    starts_.push_back(sizes::sum("tokens of a sequence", starts_.back(), count));
  }
  for (const auto& runs : heads_) {
    if (runs.size() != tokens_.size())
      fail(ErrorKind::kValue, "runs of heads for ", runs.size(), " ranks, parts of the sequence for ", tokens_.size());
    all_heads_.push_back(0);
    for (const auto& [start, stop] : runs) {
      if (start < 0 || stop < start) fail(ErrorKind::kValue, "a run of heads from ", start, " to ", stop);
      all_heads_.back() = std::max(all_heads_.back(), stop);
    }
    std::vector<bool> seen(static_cast<size_t>(all_heads_.back()));
    for (const auto& [start, stop] : runs) std::fill(seen.begin() + start, seen.begin() + stop, true);
    const auto missing = std::find(seen.begin(), seen.end(), false);
    if (missing != seen.end())
      fail(ErrorKind::kValue, "head ", missing - seen.begin(), " of ", all_heads_.back(), " is on no rank");
  }
}

int64_t SequenceCut::stacked_heads(size_t tensor) const {
  int64_t sum = 0;
  for (const auto& [start, stop] : heads_[tensor]) sum += stop - start;
  return sum;
}

SequenceBox SequenceCut::in_part(size_t tensor, int holder, int reader) const {
  return {0, tokens_[holder], heads_[tensor][reader].first, heads(tensor, reader)};
}

SequenceBox SequenceCut::in_whole(size_t tensor, int holder, int reader) const {
  return {starts_[holder], tokens_[holder], 0, heads(tensor, reader)};
}

SequenceBox SequenceCut::in_stack(size_t tensor, int holder, int reader) const {
  int64_t before = 0;
  for (int rank = 0; rank < reader; ++rank) before += heads(tensor, rank);
  return {0, tokens_[holder], before, heads(tensor, reader)};
}

}  // namespace ds::plan
