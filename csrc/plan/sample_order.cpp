#include "plan/sample_order.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace ds::plan {
namespace {

// The finalizer of splitmix64 (Steele et al. 2014, "Fast Splittable Pseudorandom Number Generators").
uint64_t mixed(uint64_t bits) {
  bits += 0x9e3779b97f4a7c15u;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  return bits ^ (bits >> 31);
}

uint64_t key_of(uint64_t seed, uint64_t kind, int64_t first, int64_t second) {
  const uint64_t begun = mixed(mixed(seed) ^ kind);
  return mixed(mixed(begun ^ static_cast<uint64_t>(first)) ^ static_cast<uint64_t>(second));
}

constexpr uint64_t kOfClusters = 1, kOfMembers = 2;  // kinds of permutations

KeyedPermutation members_of(uint64_t seed, size_t cluster, int64_t size, int64_t taken) {
  const uint64_t key = key_of(seed, kOfMembers, static_cast<int64_t>(cluster), taken / size);
  return {key, static_cast<uint64_t>(size)};
}

}  // namespace

KeyedPermutation::KeyedPermutation(uint64_t key, uint64_t size) : size_(size) {
  int bits = 1;
  while (bits < 63 && (uint64_t{1} << bits) < size) ++bits;
  high_bits_ = bits / 2;
  low_bits_ = bits - high_bits_;
  for (int round = 0; round < kRounds; ++round) keys_[round] = mixed(key + static_cast<uint64_t>(round));
}

uint64_t KeyedPermutation::operator()(uint64_t number) const {
  if (size_ == 1) return 0;
  const uint64_t low_mask = (uint64_t{1} << low_bits_) - 1, high_mask = (uint64_t{1} << high_bits_) - 1;
  do {
    uint64_t high = number >> low_bits_, low = number & low_mask;
    for (int round = 0; round < kRounds; round += 2) {
      high ^= mixed(keys_[round] ^ low) & high_mask;
      low ^= mixed(keys_[round + 1] ^ high) & low_mask;
    }
    number = high << low_bits_ | low;
  } while (number >= size_);
  return number;
}

void SampleOrder::join(const std::vector<int64_t>& sizes, bool last) {
  if (state_.last) fail(ErrorKind::kValue, "clusters cannot join after the last ones");
  for (const int64_t size : sizes) {
    if (size < 1) fail(ErrorKind::kValue, "a cluster has ", size, " samples: it must have at least one");
    starts_.push_back(sizes_.empty() ? 0 : starts_.back() + sizes_.back());
    members_.push_back(members_of(seed_, sizes_.size(), size, 0));
    sizes_.push_back(size);
    state_.taken.push_back(0);
  }
  state_.last = last;
  ++state_.joins;
  state_.round = state_.drawn = 0;
  state_.weights.clear();
  if (last) {
    for (size_t i = 0; i < sizes_.size(); ++i) state_.weights.push_back(sizes_[i] - state_.taken[i] % sizes_[i]);
  }
  begin_round();
}

// The permutation of the state.
void SampleOrder::begin_round() {
  const std::vector<int64_t>& weights = state_.weights.empty() ? sizes_ : state_.weights;
  ends_.clear();
  int64_t all = 0;
  for (const int64_t weight : weights) ends_.push_back(all += weight);
  if (all > 0) {
    clusters_ = {key_of(seed_, kOfClusters, state_.joins, state_.round), static_cast<uint64_t>(all)};
  }
}

void SampleOrder::draw(int64_t count, int64_t* samples) {
  if (sizes_.empty()) fail(ErrorKind::kValue, "no cluster has joined: there is no sample to draw");
  for (int64_t i = 0; i < count; ++i) {
    if (state_.drawn == ends_.back()) {
      ++state_.round;
      state_.drawn = 0;
      state_.weights.clear();
      begin_round();
    }
    const auto at = static_cast<int64_t>(clusters_(static_cast<uint64_t>(state_.drawn++)));
    const auto cluster = static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), at) - ends_.begin());
    int64_t& taken = state_.taken[cluster];
    const int64_t size = sizes_[cluster], place = taken % size;
    if (place == 0) members_[cluster] = members_of(seed_, cluster, size, taken);
    samples[i] = starts_[cluster] + static_cast<int64_t>(members_[cluster](static_cast<uint64_t>(place)));
    ++taken;
  }
}

SampleOrder SampleOrder::restored(uint64_t seed, const std::vector<int64_t>& sizes, State state) {
  SampleOrder made(seed);
  bool fits = state.taken.size() == sizes.size();
  fits = fits && (state.weights.empty() || (state.weights.size() == sizes.size() && state.last && state.round == 0));
  fits = fits && state.joins >= 1 && state.round >= 0 && state.drawn >= 0;
  for (size_t i = 0; fits && i < sizes.size(); ++i) {
    fits = state.taken[i] >= 0;
    if (!state.weights.empty()) fits = fits && state.weights[i] >= 1 && state.weights[i] <= sizes[i];
  }
  if (!fits || sizes.empty())
    fail(ErrorKind::kValue, "the saved position does not belong to these ", sizes.size(), " clusters");
  made.join(sizes, false);
  made.state_ = std::move(state);
  for (size_t i = 0; i < sizes.size(); ++i) made.members_[i] = members_of(seed, i, sizes[i], made.state_.taken[i]);
  made.begin_round();
  if (made.state_.drawn > made.ends_.back()) {
    fail(ErrorKind::kValue, "the saved position has ", made.state_.drawn, " draws of a permutation of ",
         made.ends_.back());
  }
  return made;
}

}  // namespace ds::plan
