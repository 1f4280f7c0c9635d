// Options of the reduction of gradients.
#pragma once
#include <c10/core/ScalarType.h>
#include <c10/util/Optional.h>

#include <cstdint>

namespace ds::zero {

struct ReducerOptions {
  int64_t bucket_numel = INT64_MAX;          // elements that are reduced together, at most
  bool overlap = true;                       // launch buckets while backward runs
  bool scatter = true;                       // sharded: reduce each row to its owner alone; false: all-reduce
  double predivide = 1.0;                    // gradients are multiplied by this before the sum over ranks
  double postscale = 1.0;                    // and by this after it
  c10::optional<at::ScalarType> comm_dtype;  // of the buffers that travel; unset: their own
  bool find_nonfinite_grads = false;         // remember which local gradients were not finite
  bool blocks = false;                       // sharded: rows travel as blocks of integers (qgZ)
  // Adds what codes of blocks lose to later gradients (LoCo), and forgets it every `block_reset_steps` steps.
  bool block_errors = false;
  float block_error_beta = 0;
  int64_t block_reset_steps = INT64_MAX;
  // Each rank keeps its own gradients, because the optimizer exchanges something else.
  bool local = false;
  // The host may wait in backward for an earlier reduction. Not where ranks wait for each other in other ways
  // meanwhile.
  bool waits = true;
};

// The limit for buckets of the store: the user's, and at least a few buckets where they overlap with backward.
int64_t bucket_limit(const ReducerOptions& options, int64_t total_numel, int ranks, bool on_host);

}  // namespace ds::zero
