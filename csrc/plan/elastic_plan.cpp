#include "plan/elastic_plan.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

#include "base/error.h"
#include "base/sizes.h"

namespace ds::plan {

namespace {

constexpr int64_t kPrimes[] = {2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47};
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

struct Composite {
  int64_t number, divisors;
};

// Products of the first primes with exponents that never rise: every highly composite number is one.
void products(size_t prime, int most, Composite so_far, int64_t limit, std::vector<Composite>& out) {
  out.push_back(so_far);
  if (prime == std::size(kPrimes)) return;
  int64_t number = so_far.number;
  for (int exponent = 1; exponent <= most && number <= limit / kPrimes[prime]; ++exponent) {
    number *= kPrimes[prime];
    products(prime + 1, exponent, {number, so_far.divisors * (exponent + 1)}, limit, out);
  }
}

// The least common multiple; kMost when it is beyond any integer here.
int64_t common_multiple(const std::vector<int64_t>& numbers) {
  int64_t out = 1;
  for (const int64_t number : numbers) {
    if (!sizes::multiply(out, number / std::gcd(out, number), &out)) return kMost;
  }
  return out;
}

void check_micros(const ElasticRequest& r) {
  for (const int64_t micro : r.micros) {
    if (micro > r.max_batch)
      fail(ErrorKind::kValue, "all micro batch sizes must be at most the largest train batch size: ", micro,
           " is larger than ", r.max_batch, ".");
  }
}

}  // namespace

int64_t highly_composite(int64_t limit) {
  if (limit < 1) return 0;
  std::vector<Composite> found;
  products(0, 62, {1, 1}, limit, found);
  // The smallest of those with the most divisors.
  const auto better = [](const Composite& a, const Composite& b) {
    return a.divisors != b.divisors ? a.divisors < b.divisors : a.number > b.number;
  };
  return std::max_element(found.begin(), found.end(), better)->number;
}

std::vector<int64_t> elastic_worlds(int64_t batch, const std::vector<int64_t>& micros, int64_t low, int64_t high) {
  std::set<int64_t> out;
  const auto add = [&](int64_t world) {
    if (world >= low && world <= high) out.insert(world);
  };
  for (const int64_t micro : micros) {
    if (batch % micro != 0) continue;
    const int64_t parts = batch / micro;
    for (int64_t d = 1; d <= high && d <= parts / d; ++d) {
      if (parts % d != 0) continue;
      add(d);
      add(parts / d);
    }
  }
  return {out.begin(), out.end()};
}

ElasticPlan elastic_plan(const ElasticRequest& r) {
  check_micros(r);
  std::vector<int64_t> bases = r.micros;
  bases.push_back(common_multiple(r.micros));
  std::set<int64_t> candidates;
  for (const int64_t base : bases) {
    if (base <= r.max_batch) candidates.insert(base * highly_composite(r.max_batch / base));
  }
  ElasticPlan best{0, {}};
  for (const int64_t batch : candidates) {  // ascending
    std::vector<int64_t> worlds = elastic_worlds(batch, r.micros, r.min_ranks, r.max_ranks);
    const bool more = worlds.size() > best.worlds.size();
    const bool as_many = !worlds.empty() && worlds.size() == best.worlds.size();
    if (more || (as_many && r.prefer_larger)) best = {batch, std::move(worlds)};
  }
  return best;
}

int64_t elastic_micro(int64_t batch, int64_t ranks, const std::vector<int64_t>& micros, bool larger) {
  int64_t found = 0;
  for (const int64_t micro : micros) {
    if (ranks < 1 || batch % ranks != 0 || batch / ranks % micro != 0) continue;
    if (found == 0 || (larger && micro > found)) found = micro;
  }
  return found;
}

ElasticPlan elastic_nodes(const ElasticRequest& r, const ElasticNodes& nodes) {
  const int64_t per_node = nodes.ranks_per_node, shared = nodes.model_parallel;
  if (per_node % shared != 0)
    fail(ErrorKind::kValue, "a node's ", per_node, " ranks cannot be cut into copies of the model of ", shared,
         " ranks each: num_gpus_per_node must be divisible by model_parallel_size.");
  const int64_t copies = per_node / shared;  // of the model, on one node
  ElasticRequest by_node = r;
  by_node.max_batch = r.max_batch / copies;
  by_node.min_ranks = r.min_ranks / per_node;
  by_node.max_ranks = r.max_ranks / per_node;
  ElasticPlan plan = elastic_plan(by_node);
  plan.batch *= copies;
  for (int64_t& world : plan.worlds) world *= copies;
  return plan;
}

ElasticNodePlan elastic_node_plan(const ElasticRequest& r, const ElasticNodes& nodes, int64_t ranks) {
  const int64_t per_node = nodes.ranks_per_node, shared = nodes.model_parallel;
  if (per_node % shared == 0 && (ranks < 1 || ranks % per_node != 0))
    fail(ErrorKind::kValue, ranks, " ranks are not whole nodes of ", per_node, " (num_gpus_per_node): the nearest are ",
         std::max<int64_t>(1, ranks / per_node) * per_node, " and ", (ranks / per_node + 1) * per_node, ".");
  const ElasticPlan plan = elastic_nodes(r, nodes);
  ElasticNodePlan out{plan.batch, plan.worlds, 0, true};
  const int64_t mine = ranks / shared;
  if (!std::binary_search(out.worlds.begin(), out.worlds.end(), mine)) {
    out = {0, {mine}, 0, false};
    for (const int64_t micro : r.micros) {
      int64_t unit = 0;
      if (!sizes::multiply(micro, mine, &unit) || unit > r.max_batch) continue;
      const int64_t batch = r.max_batch / unit * unit;
      const bool better = r.prefer_larger ? batch > out.batch : batch < out.batch;
      if (out.batch == 0 || better) out.batch = batch;
    }
  }
  if (out.batch > 0) out.micro = elastic_micro(out.batch, mine, r.micros, r.prefer_larger);
  return out;
}

}  // namespace ds::plan
