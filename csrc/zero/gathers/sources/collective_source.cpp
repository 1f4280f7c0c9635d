// Gathers by one collective call of all ranks, for parameters that have no engine.
#include <c10/core/GradMode.h>

#include "zero/gathers/sources/staged_gather.h"
#include "zero/gathers/shard_source.h"

namespace ds::zero {

namespace {

class CollectiveSource : public ShardSource {
 public:
  explicit CollectiveSource(comm::CommunicatorPtr communicator)
      : ShardSource(nullptr), communicator_(std::move(communicator)) {}
  void gather(const std::vector<ShardedParam*>& params, const std::vector<ShardedParam*>&, Values values) override {
    at::NoGradGuard no_grad;
    const std::vector<ShardedParam*> wanted = absent(params, values);
    if (wanted.empty()) return;
    for (ShardedParam* param : wanted) param->mark_inflight();
    StagedGather gather(*communicator_, buffers_, wanted);
    collectives_ += gather.collectives();
    std::vector<std::pair<ShardedParam*, at::Tensor>> here;
    for (ShardedParam* param : wanted) {
      gathered_ += param->padded_numel() - param->slice_numel();
      here.emplace_back(param, gather.take(*param));
    }
    take_full(here, values);
  }
  void refresh(const std::vector<ShardedParam*>& params, Values) override {
    refresh_together(*communicator_, params, Values::kUsed);
  }
  void before_write() override {}
  void after_write() override {}
  const char* name() const override { return "collectives"; }

 private:
  comm::CommunicatorPtr communicator_;
};

}  // namespace

ShardSourcePtr collective_source(comm::CommunicatorPtr communicator) {
  return std::make_shared<CollectiveSource>(std::move(communicator));
}

}  // namespace ds::zero
