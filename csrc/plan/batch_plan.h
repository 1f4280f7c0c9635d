// The three batch sizes and the number of data-parallel ranks: any two of the sizes give the third.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

namespace ds::plan {

struct BatchRequest {
  std::optional<int64_t> train;         // samples per optimizer step, over all ranks
  std::optional<int64_t> micro;         // samples per rank and forward
  std::optional<int64_t> accumulation;  // forwards per optimizer step
  int64_t world = 1;                    // data-parallel ranks
  std::string world_source;             // the origin of that number, for messages: "torch.distributed"
};

struct BatchPlan {
  int64_t train, micro, accumulation;  // train == micro * accumulation * world, all > 0
};

// Missing sizes are derived:
//   train, micro -> accumulation = train / micro / world         train only -> accumulation 1, micro = train / world
//   train, accumulation -> micro = train / world / accumulation  micro only -> accumulation 1, train = micro * world
//   micro, accumulation -> train = micro * accumulation * world
// Throws Error(kAssertion) naming the numbers and the nearest choices that work: when train and micro are both
// missing, when a size or the world is not positive, and when the product does not come out.
BatchPlan plan_batch(const BatchRequest& request);

}  // namespace ds::plan
