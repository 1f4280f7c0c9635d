// The table of tensor-parallel cuts: which elements along one dimension of a tensor each rank has. Layers, checkpoints
// and the exchanges of sequence parallelism read it. Integers only.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

namespace ds::plan {

using UnitRun = std::pair<int64_t, int64_t>;  // start, stop: units (heads, elements) from start up to stop, without it

// `count` units in one run for each rank, whole units; the first runs are longer by one where the ranks do not divide
// them.
std::vector<UnitRun> unit_runs(int64_t count, int64_t ranks);

// The runs of key/value heads that runs of query heads read: query head i reads head i // readers of `count` ones. An
// empty run reads (0, 0).
std::vector<UnitRun> shared_runs(const std::vector<UnitRun>& runs, int64_t readers, int64_t count);

// The heads of an attention layer under tensor parallelism. With as many key/value heads as ranks or more, these are
// dealt and query heads follow them. If the ranks are a multiple of the key/value heads, each of these has equally many
// copies, and its query heads are dealt among them. Otherwise query heads are dealt, and key/value heads follow.
// Returns the runs of query heads and those of key/value heads.
std::pair<std::vector<UnitRun>, std::vector<UnitRun>> grouped_runs(int64_t query, int64_t kv, int64_t ranks);

// The elements of each rank along a dimension of `total`, as deepspeed.module_inject.tp_shard publishes them. Whole
// `units` (key/value heads; 0: there are none) where they divide the total, else whole grains of `grain` elements where
// the total has one or more, else single elements; the first ranks have one more. A rest that is less
// than a grain belongs to no rank, as published.
std::vector<int64_t> shard_sizes(int64_t total, int64_t ranks, int64_t grain, int64_t units);

struct CutPiece {
  int64_t in_slice, in_whole, length;  // first element within the rank's slice and within the whole, and how many
};

// A rank's slice is what it has of the first sub-parameter, then what it has of the second, and so on.
class TensorCut {
 public:
  // sizes[sub]: of the sub-parameters that lie side by side along the dimension. runs[sub][rank]: the elements of the
  // sub-parameter that the rank has. Runs of ranks may overlap (the ranks have copies), and together they are the whole
  // sub-parameter. ErrorKind::kValue names what does not fit.
  TensorCut(const std::vector<int64_t>& sizes, const std::vector<std::vector<UnitRun>>& runs);

  int ranks() const { return ranks_; }
  int64_t size() const { return size_; }  // of the whole
  int64_t width(int rank) const;          // of the rank's slice
  // (start, length) in the whole, in the order of the rank's slice; runs that touch are one.
  std::vector<std::pair<int64_t, int64_t>> runs(int rank) const;
  // Those elements of the rank's slice that no lower rank has: the pieces of all ranks are the whole, once.
  std::vector<CutPiece> owned(int rank) const { return pieces(rank, true); }
  // The ranks that have the elements of the rank's slice, ascending, where they are the same for all of these; empty
  // where they are not. A slice without elements is the rank's alone.
  std::vector<int> holders(int rank) const;
  bool copied() const;  // several ranks have some element
  bool mixed() const;   // some rank has copied elements and elements that no other rank has

 private:
  struct Segment {
    int64_t start, length;   // in the whole
    std::vector<int> ranks;  // ascending
  };

  void check(int rank) const;
  // The pieces of a rank's slice, or of what no lower rank has of it. Pieces that touch are one.
  std::vector<CutPiece> pieces(int rank, bool first_only) const;

  int ranks_ = 0;
  int64_t size_ = 0;
  std::vector<Segment> segments_;  // the whole, in order, cut wherever the run of some rank begins or ends
};

}  // namespace ds::plan
