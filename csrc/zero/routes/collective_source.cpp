#include <c10/core/GradMode.h>

#include "zero/routes/staged_gather.h"
#include "zero/shard_source.h"

namespace ds::zero {

namespace {

class CollectiveSource : public ShardSource {
 public:
  explicit CollectiveSource(comm::CommunicatorPtr communicator) : communicator_(std::move(communicator)) {}
  void gather(const std::vector<ShardedParam*>& params, const std::vector<ShardedParam*>&) override {
    at::NoGradGuard no_grad;
    std::vector<ShardedParam*> absent;
    for (ShardedParam* param : params)
      if (!param->available() && std::find(absent.begin(), absent.end(), param) == absent.end())
        absent.push_back(param);
    if (absent.empty()) return;
    for (ShardedParam* param : absent) param->mark_inflight();
    StagedGather gather(*communicator_, pool_, absent, std::nullopt);
    collectives_ += gather.collectives();
    std::vector<std::pair<ShardedParam*, at::Tensor>> here;
    for (ShardedParam* param : absent) {
      gathered_ += param->padded_numel() - param->slice_numel();
      here.emplace_back(param, gather.take(*param));
    }
    take_full(here);
  }
  void refresh(const std::vector<ShardedParam*>& params) override { refresh_together(*communicator_, pool_, params); }
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
