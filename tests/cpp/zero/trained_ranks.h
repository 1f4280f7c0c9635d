// Trainings by ranks that are threads, and comparing what they end with.
#pragma once
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "../on_threads.h"
#include "comm/communicator.h"

namespace ds::zero {

// Numbers between -0.5 and 0.5 that differ from seed to seed.
inline at::Tensor values(double seed, at::IntArrayRef sizes, at::ScalarType type = at::kFloat) {
  int64_t numel = 1;
  for (int64_t size : sizes) numel *= size;
  return at::sin(at::arange(numel, type) * 0.7 + seed).reshape(sizes) * 0.5;
}

// The results of train(rank) on each rank; all of them run at the same time.
template <typename Result, typename Train>
std::vector<Result> on_ranks(int world, const Train& train) {
  std::vector<Result> results(world);
  on_threads(world, [&](int rank) { results[rank] = train(rank); });
  return results;
}

inline void expect_same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << what << " " << i;
}

}  // namespace ds::zero
