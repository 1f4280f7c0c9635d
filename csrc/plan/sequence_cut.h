// The tokens and heads of each rank while ranks exchange parts of a sequence with all heads for the whole sequence with
// some heads (Ulysses). Integers only.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace ds::plan {

using HeadRun = std::pair<int64_t, int64_t>;  // start, stop

struct SequenceBox {
  int64_t token, tokens, head, heads;  // first one and how many, in the tensor that it is a box of
};

class SequenceCut {
 public:
  // tokens[rank]: of the rank's part. heads[tensor][rank]: the rank's run of the heads; runs of a tensor may overlap,
  // and together they are all of its heads. ErrorKind::kValue for what does not fit together.
  SequenceCut(std::vector<int64_t> tokens, std::vector<std::vector<HeadRun>> heads);

  int ranks() const { return static_cast<int>(tokens_.size()); }
  size_t tensors() const { return heads_.size(); }
  int64_t length() const { return starts_.back(); }
  int64_t tokens(int rank) const { return tokens_[rank]; }
  int64_t all_heads(size_t tensor) const { return all_heads_[tensor]; }
  int64_t heads(size_t tensor, int rank) const { return heads_[tensor][rank].second - heads_[tensor][rank].first; }
  // Some head is on several ranks: a gradient is the sum over them.
  bool copied(size_t tensor) const { return stacked_heads(tensor) != all_heads_[tensor]; }
  int64_t stacked_heads(size_t tensor) const;  // copies counted each

  // The tokens of `holder` that `reader` has: in the holder's part, which has all heads...
  SequenceBox in_part(size_t tensor, int holder, int reader) const;
  // ... in the reader's whole sequence, which has its heads...
  SequenceBox in_whole(size_t tensor, int holder, int reader) const;
  // ... and in a part of the holder with the runs of all readers side by side.
  SequenceBox in_stack(size_t tensor, int holder, int reader) const;

 private:
  std::vector<int64_t> tokens_, starts_;
  std::vector<std::vector<HeadRun>> heads_;
  std::vector<int64_t> all_heads_;
};

}  // namespace ds::plan
