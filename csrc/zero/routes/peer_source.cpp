#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include "zero/shard_source.h"

namespace ds::zero {

namespace {

class PeerSource : public ShardSource {
 public:
  PeerSource(comm::CommunicatorPtr communicator, comm::PeerMemoryPtr memory)
      : communicator_(std::move(communicator)), memory_(std::move(memory)) {
    for (int rank = 0; rank < communicator_->size(); ++rank) regions_.push_back(memory_->region(rank));
  }

  // Nothing is started ahead: the copy is made by this rank's own cores, and doing it earlier saves nothing.
  void gather(const std::vector<ShardedParam*>& params, const std::vector<ShardedParam*>&) override {
    at::NoGradGuard no_grad;
    std::vector<std::pair<ShardedParam*, at::Tensor>> here;
    for (ShardedParam* param : absent(params)) {
      if (here.empty()) memory_->await(version_);
      const at::Tensor buffer = pool_.take(param->padded_numel(), param->shard().options());
      copy(*param, buffer);
      gathered_ += param->padded_numel() - param->slice_numel();
      here.emplace_back(param, buffer);
    }
    take_full(here);
  }

  void refresh(const std::vector<ShardedParam*>& params) override {
    if (params.empty()) return;  // who gathers next waits
    at::NoGradGuard no_grad;
    memory_->await(version_);
    for (ShardedParam* param : params) {
      copy(*param, param->buffer());
      gathered_ += param->padded_numel() - param->slice_numel();
    }
  }
  void before_write() override { communicator_->barrier(); }
  void after_write() override {
    memory_->publish();
    ++version_;
  }
  const char* name() const override { return "peer memory"; }

 private:
  void copy(const ShardedParam& param, const at::Tensor& buffer) const {
    const at::Tensor& shard = param.shard();
    if (param.slice_numel() == 0) return;  // has no place in the regions either
    const int64_t offset =
        static_cast<char*>(shard.data_ptr()) - static_cast<char*>(regions_[communicator_->rank()].data_ptr());
    const int64_t bytes = param.slice_numel() * static_cast<int64_t>(shard.element_size());
    const at::Tensor target = buffer.view(at::kByte);
    for (int rank = 0; rank < communicator_->size(); ++rank)
      target.narrow(0, rank * bytes, bytes).copy_(regions_[rank].narrow(0, offset, bytes));
  }

  comm::CommunicatorPtr communicator_;
  comm::PeerMemoryPtr memory_;
  std::vector<at::Tensor> regions_;
  int64_t version_ = 0;
};

}  // namespace

ShardSourcePtr peer_source(comm::CommunicatorPtr communicator, comm::PeerMemoryPtr memory) {
  return std::make_shared<PeerSource>(std::move(communicator), std::move(memory));
}

}  // namespace ds::zero
