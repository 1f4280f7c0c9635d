// The model's weights after an update of which each rank has made its shard: bucket by bucket, beside the update of the
// next one.
#pragma once
#include <string>
#include <vector>

#include "zero/spaces/param_store.h"

namespace ds::zero {

struct GatherOptions {
  bool overlap = true;     // gather a bucket's parameters while the next one is stepped
  bool collective = true;  // by all-gather; false: by one broadcast from each owner
};

class StepGather {
 public:
  StepGather(const ParamStore& store, GatherOptions options) : store_(store), options_(options) {}

  bool overlaps() const { return options_.overlap; }
  void start(const ParamSpace& space, const plan::Bucket& bucket);
  void start_all(const ParamSpace& space);  // from the first parameters on: the next forward wants them first
  void finish();                            // all weights are here, those of spaces that gather nothing, too

 private:
  void arrive(const ParamSpace& space, plan::Range range) const;
  void start_together();

  // Elements that one call gathers, of several buckets where a communicator takes several tensors in one call: less
  // than a bucket starts, more begins too late.
  static constexpr int64_t kTogether = 50'000'000;

  const ParamStore& store_;
  const GatherOptions options_;
  std::vector<comm::WorkPtr> started_;
  std::vector<comm::TensorPair> waiting_;  // for others of `ranks_`, to be gathered by one call
  comm::CommunicatorPtr ranks_;
  std::string tag_;
  int64_t waiting_numel_ = 0;
};

}  // namespace ds::zero
