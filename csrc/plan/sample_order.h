// The order of samples under a curriculum. It is a function of a seed and of the number of samples drawn before.
//
// [Note: draws]
// Samples are grouped into *clusters*, which join the pool one after another as the difficulty grows. A batch is drawn
// from the whole pool, so a cluster has its share of the draws. No sample of a cluster comes a second time before all
// of it have come:
// - The clusters of draws come from a permutation of the pool: in `n` draws, n samples in the pool, a cluster of m
//   samples is drawn m times. When a cluster joins, a new permutation begins.
// - The i-th draw of a cluster is the sample i % m of its permutation number i / m.
// When no cluster will join any more, the next permutation has only the samples that the clusters have left in their
// own permutations. Thus all clusters end at the same draw, and from then on each sample of the pool comes once in n
// draws.
//
// Permutations are keyed and need no table: there is memory for the clusters only, and a draw takes constant time
// besides the search for its cluster.
#pragma once
#include <cstdint>
#include <vector>

namespace ds::plan {

// A one-to-one map of the numbers [0, size) onto themselves. Feistel rounds over the fewest bits that hold size - 1;
// results that are too large are mapped again (fewer than two times on average).
class KeyedPermutation {
 public:
  KeyedPermutation(uint64_t key, uint64_t size);  // size >= 1
  uint64_t operator()(uint64_t number) const;     // number < size

 private:
  static constexpr int kRounds = 8;
  uint64_t size_;
  int high_bits_, low_bits_;
  uint64_t keys_[kRounds];
};

class SampleOrder {
 public:
  explicit SampleOrder(uint64_t seed) : seed_(seed) {}

  // Clusters of these sizes join the pool. `last`: no others will join. Throws ErrorKind::kValue for a size below one,
  // and if the last ones have joined already.
  void join(const std::vector<int64_t>& sizes, bool last);

  // The next `count` draws. A draw is the number of a sample in the pool, in which the clusters are in the order in
  // which they have joined. Throws ErrorKind::kValue if the pool is empty.
  void draw(int64_t count, int64_t* samples);

  // The next draws depend on this, the seed and the sizes of the clusters.
  struct State {
    bool last = false;  // no others will join
    int64_t joins = 0;  // the number of times that clusters have joined; each begins a sequence of permutations
    int64_t round = 0;  // the number of the permutation in its sequence
    int64_t drawn = 0;  // draws from it
    std::vector<int64_t> taken;    // draws of each cluster
    std::vector<int64_t> weights;  // draws of each cluster in this permutation, if they differ from the sizes
  };
  const State& state() const { return state_; }
  const std::vector<int64_t>& sizes() const { return sizes_; }

  // The order with these clusters and this state. Throws ErrorKind::kValue if the state belongs to other clusters.
  static SampleOrder restored(uint64_t seed, const std::vector<int64_t>& sizes, State state);

 private:
  void begin_round();
  uint64_t seed_;
  std::vector<int64_t> sizes_, starts_;  // of clusters; the number of the first sample of each
  State state_;
  std::vector<int64_t> ends_;  // of clusters in this permutation: sums of weights
  KeyedPermutation clusters_{0, 1};
  std::vector<KeyedPermutation> members_;  // of each cluster, in its pass
};

}  // namespace ds::plan
