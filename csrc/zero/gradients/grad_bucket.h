// The gradients that travel together.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "zero/spaces/param_store.h"

namespace ds::zero {

// The state of a bucket. A backward starts in kFilling and ends in kFilling (nothing was reduced), kReduced or
// kArrived; one that raises ends in kAbandoned.
enum class BucketState : uint8_t {
  kFilling,    // gradients are written into the slots
  kLaunched,   // the reduction has started, and may still read the slots
  kReceived,   // `received` is this rank's row of the sum, and the slots are free
  kLeaving,    // that row is being written to its tier; it counts when the backward has ended
  kReduced,    // the sum is in the row of reduced gradients
  kArrived,    // the row is complete, and GradArrivals has been told
  kAbandoned,  // the backward has raised
};
constexpr int kBucketStates = 7;
const char* name_of(BucketState state);
bool may_follow(BucketState from, BucketState to);

// The properties of a bucket that never change.
struct BucketFacts {
  int32_t space;
  int32_t number;    // among the buckets of its space
  std::string name;  // of its first parameter
  plan::Bucket plan;
  int64_t begin, numel;  // in the full space
  std::vector<int32_t> params;
  bool in_place;                                    // as its space
  bool eager;                                       // leaves before backward's end even where nothing overlaps
  bool by_rows;                                     // one parameter, of which only touched rows travel
  std::vector<std::pair<int64_t, int64_t>> gaps{};  // padding, as [begin, end) within the bucket

  int64_t row_numel() const { return plan.shard_end - plan.shard_begin; }  // of each rank
};

class ReduceWay;

struct GradBucket : BucketFacts {
  explicit GradBucket(BucketFacts facts) : BucketFacts(std::move(facts)) {}

  BucketState state() const { return state_; }
  // The only way to another state. Fails, and names both states and the bucket, where `next` may not follow.
  void enter(BucketState next);

  std::shared_ptr<ReduceWay> way{};  // in which it is added up over the ranks
  bool row_holds = false;            // the row of reduced gradients holds a sum, perhaps of earlier micro-steps alone

  // State of one backward.
  int32_t pending = -1;   // parameters still expected to fire; -1: unknown, leaves at the end
  int32_t late = 0;       // gradients that came after it had left, over all ranks
  at::Tensor before{};    // kArrived: the row's values of earlier backwards
  at::Tensor slots{};     // `numel` elements
  at::Tensor wire{};      // the buffer that travels when it is not the slots themselves
  at::Tensor received{};  // this rank's row of the sum
  comm::WorkPtr work{};

 private:
  BucketState state_ = BucketState::kFilling;
};

// The buckets of all spaces, in the order in which backward completes them: from the module's last parameters to its
// first.
std::vector<GradBucket> grad_buckets(const ParamStore& store);

}  // namespace ds::zero
