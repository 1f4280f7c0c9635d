#include "plan/partition.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"

namespace ds::plan {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// table[p][i]: best cost of cutting the first i items into p non-empty parts; cut[p][i]: where its last part begins.
// `join(cost of the parts before, weight of the last part)` is the cost of both; smaller is better.
template <typename Join>
std::vector<std::vector<double>> best_cuts(const std::vector<double>& prefix, int64_t parts, const Join& join,
                                           std::vector<std::vector<int64_t>>* cut) {
  const auto n = static_cast<int64_t>(prefix.size()) - 1;
  std::vector<std::vector<double>> table(parts + 1, std::vector<double>(n + 1, kNever));
  cut->assign(parts + 1, std::vector<int64_t>(n + 1, 0));
  table[0][0] = 0;
  for (int64_t p = 1; p <= parts; ++p) {
    for (int64_t i = p; i <= n - (parts - p); ++i) {
      for (int64_t begin = p - 1; begin < i; ++begin) {
        if (table[p - 1][begin] == kNever) continue;
        const double cost = join(table[p - 1][begin], prefix[i] - prefix[begin]);
        if (cost < table[p][i]) {
          table[p][i] = cost;
          (*cut)[p][i] = begin;
        }
      }
    }
  }
  return table;
}

}  // namespace

std::vector<int64_t> partition_uniform(int64_t items, int64_t parts) {
  if (parts < 1 || items < 0)
    fail(ErrorKind::kValue, "cannot cut ", items, " items into ", parts, " parts: parts must be >= 1 and items >= 0.");
  std::vector<int64_t> offsets(parts + 1);
  const int64_t size = items / parts, more = items % parts;
  for (int64_t p = 0; p <= parts; ++p) offsets[p] = p * size + std::min(p, more);
  return offsets;
}

std::vector<int64_t> partition_balanced(const std::vector<double>& weights, int64_t parts) {
  const auto n = static_cast<int64_t>(weights.size());
  for (double weight : weights)
    if (!std::isfinite(weight) || weight < 0)
      fail(ErrorKind::kValue, "cannot balance a part of weight ", weight, ": weights must be finite and >= 0.");
  if (n <= parts || parts < 1) return partition_uniform(n, parts);

  std::vector<double> prefix(n + 1, 0);
  for (int64_t i = 0; i < n; ++i) prefix[i + 1] = prefix[i] + weights[i];
  std::vector<std::vector<int64_t>> cut;
  const double heaviest = best_cuts(
      prefix, parts, [](double before, double last) { return std::max(before, last); }, &cut)[parts][n];
  best_cuts(
      prefix, parts, [heaviest](double before, double last) { return last > heaviest ? kNever : before + last * last; },
      &cut);

  std::vector<int64_t> offsets(parts + 1, n);
  for (int64_t p = parts; p > 0; --p) offsets[p - 1] = cut[p][offsets[p]];
  return offsets;
}

}  // namespace ds::plan
