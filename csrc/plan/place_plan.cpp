#include "plan/place_plan.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/ranges.h"

namespace ds::plan {

namespace {

using Shares = std::array<PlaceShares, 3>;  // of gradients, masters, states

double seconds_of(double bytes, double rate) { return rate > 0 ? bytes / rate : 0.0; }

struct Cost {
  double longest = 0, all = 0;
  bool operator<(const Cost& other) const {
    constexpr double kSame = 1e-9;
    if (std::abs(longest - other.longest) > kSame * std::max(longest, other.longest)) return longest < other.longest;
    return all < other.all * (1 - kSame);
  }
};

// The results of place_seconds() for every combination of tiers, computed once.
class Costs {
 public:
  Costs(const PlaceNeed& need, const PlaceRates& rates) {
    for (int g = 0; g < 3; ++g)
      for (int m = 0; m < 3; ++m)
        for (int s = 0; s < 3; ++s)
          table_[g][m][s] = place_seconds(need, rates, PlaceTier(g), PlaceTier(m), PlaceTier(s));
  }

  Cost of(const Shares& shares) const {
    const std::array<double, 3> sums = spent(shares);
    return {*std::max_element(sums.begin(), sums.end()), sums[0] + sums[1] + sums[2]};
  }

  std::array<double, 3> spent(const Shares& shares) const {
    std::array<double, 8> ends = {0.0, 1.0};
    for (int k = 0; k < 3; ++k) {
      ends[2 + 2 * k] = shares[k].file;
      ends[3 + 2 * k] = std::min(1.0, shares[k].file + shares[k].host);
    }
    sort(ends);
    std::array<double, 3> sums = {};
    for (size_t i = 0; i + 1 < ends.size(); ++i) {
      const double width = ends[i + 1] - ends[i];
      if (width <= 0) continue;
      const double at = (ends[i] + ends[i + 1]) / 2;
      const auto tier = [&](const PlaceShares& of) {
        return at < of.file ? kInFiles : at < of.file + of.host ? kOnHost : kOnDevice;
      };
      const std::array<double, 3>& here = table_[tier(shares[0])][tier(shares[1])][tier(shares[2])];
      for (int r = 0; r < 3; ++r) sums[r] += width * here[r];
    }
    return sums;
  }

 private:
  std::array<double, 3> table_[3][3][3];
};

class Search {
 public:
  Search(const PlaceNeed& need, const PlaceRates& rates)
      : need_(need), costs_(need, rates), bytes_{need.grad, need.master, need.slots} {}

  // Shares that are multiples of 1 / `parts`, no further than `reach` from the best so far.
  void look(int parts, double reach) {
    const Shares around = best_;
    std::array<std::vector<PlaceShares>, 3> tried;
    for (int k = 0; k < 3; ++k)
      for (int file = 0; file <= parts; ++file)
        for (int host = 0; file + host <= parts; ++host) {
          const PlaceShares one{static_cast<double>(file) / parts, static_cast<double>(host) / parts};
          if (!found_ || (std::abs(one.file - around[k].file) <= reach && std::abs(one.host - around[k].host) <= reach))
            tried[k].push_back(one);
        }
    for (const PlaceShares& grad : tried[0])
      for (const PlaceShares& master : tried[1]) {
        if (!fits({grad, master, {0, 0}}, 2)) continue;
        for (const PlaceShares& slots : tried[2]) consider({grad, master, slots});
      }
  }

  // Places one kind after the other, as much as there is room for, in each order of tiers and kinds. Exact where memory
  // is the limit.
  void fill(const std::array<int, 3>& kinds, bool together) {
    std::array<double, 3> room = rooms();
    Shares made;
    if (together) {
      const double all = bytes_[0] + bytes_[1] + bytes_[2];
      const PlaceShares one = take(room, all);
      made = {one, one, one};
    } else {
      for (const int k : kinds) made[k] = take(room, bytes_[k]);
    }
    consider(made);
  }

  PlacePlan plan() const {
    PlacePlan made;
    made.fits = found_;
    made.grad = best_[0];
    made.master = best_[1];
    made.slots = best_[2];
    made.seconds = cost_.longest;
    return made;
  }

 private:
  std::array<double, 3> rooms() const {
    std::array<double, 3> room;
    for (int t = 0; t < 3; ++t)
      room[t] = need_.room[t] == INT64_MAX ? HUGE_VAL : static_cast<double>(std::max<int64_t>(0, need_.room[t]));
    return room;
  }

  PlaceShares take(std::array<double, 3>& room, double bytes) const {
    const double all = bytes * static_cast<double>(need_.numel);
    if (all <= 0) return {};
    const double device = std::min(room[kOnDevice], all), host = std::min(room[kOnHost], all - device);
    room[kOnDevice] -= device;
    room[kOnHost] -= host;
    room[kInFiles] -= all - device - host;
    return {std::max(0.0, all - device - host) / all, host / all};
  }

  bool fits(const Shares& shares, int kinds = 3) const {
    const std::array<double, 3> room = rooms();
    std::array<double, 3> used = {};
    for (int k = 0; k < kinds; ++k) {
      const double all = bytes_[k] * static_cast<double>(need_.numel);
      used[kInFiles] += shares[k].file * all;
      used[kOnHost] += shares[k].host * all;
      used[kOnDevice] += shares[k].device() * all;
    }
    for (int t = 0; t < 3; ++t)
      if (used[t] > room[t] * (1 + 1e-12) + 0.5) return false;
    return true;
  }

  void consider(const Shares& shares) {
    if (!fits(shares)) return;
    const Cost cost = costs_.of(shares);
    if (found_ && !(cost < cost_)) return;
    found_ = true;
    cost_ = cost;
    best_ = shares;
  }

  const PlaceNeed need_;
  const Costs costs_;
  const std::array<double, 3> bytes_;
  bool found_ = false;
  Cost cost_;
  Shares best_;
};

}  // namespace

std::array<double, 3> place_seconds(const PlaceNeed& need, const PlaceRates& rates, PlaceTier grad, PlaceTier master,
                                    PlaceTier slots) {
  const bool on_host = master != kOnDevice;
  const auto times = static_cast<double>(need.accumulation);
  double out = 0, in = 0, read = 0, written = 0;
  if (grad == kOnDevice) {
    out += on_host ? need.grad : 0;
  } else {
    out += need.grad * times;
    in += on_host ? 0 : need.grad;
  }
  if (grad == kInFiles) {
    written += need.grad * times;
    read += need.grad * times;  // once by the step, else by what adds to it
  }
  if (master == kInFiles) {
    read += need.master;
    written += need.master;
  }
  if (slots == kInFiles) {
    read += need.slots;
    written += need.slots;
  }
  if ((slots == kOnDevice) == on_host) {
    out += need.slots;
    in += need.slots;
  }
  if (on_host) in += need.weight;
  const double stepped = need.grad + 2 * need.master + 2 * need.slots + need.weight;
  const auto numel = static_cast<double>(need.numel);
  return {numel * (seconds_of(out, rates.to_host) + seconds_of(in, rates.to_device)),
          numel * (seconds_of(read, rates.file_read) + seconds_of(written, rates.file_write)),
          numel * seconds_of(stepped, on_host ? rates.host_step : rates.device_step)};
}

double step_seconds(const PlaceNeed& need, const PlaceRates& rates, const PlaceShares& grad, const PlaceShares& master,
                    const PlaceShares& slots) {
  return Costs(need, rates).of({grad, master, slots}).longest;
}

PlacePlan place_plan(const PlaceNeed& need, const PlaceRates& rates) {
  Search search(need, rates);
  search.fill({0, 1, 2}, /*together=*/false);
  search.fill({1, 2, 0}, /*together=*/false);
  search.fill({1, 0, 2}, /*together=*/false);
  search.fill({0, 2, 1}, /*together=*/false);
  search.fill({0, 1, 2}, /*together=*/true);
  if (!search.plan().fits) return search.plan();
  Search whole(need, rates);  // all of it, coarsely
  whole.look(8, 1.0);
  for (int parts : {16, 32, 64, 128, 256}) {
    if (whole.plan().fits) whole.look(parts, 2.0 / parts);
    search.look(parts, 2.0 / parts);
  }
  const PlacePlan first = search.plan(), second = whole.plan();
  return second.fits && second.seconds < first.seconds * (1 - 1e-9) ? second : first;
}

}  // namespace ds::plan
