#include "zero/shard_source.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <unordered_map>

#include "base/error.h"

namespace ds::zero {

namespace {

std::vector<ShardedParam*> missing(const std::vector<ShardedParam*>& params) {
  std::vector<ShardedParam*> result;
  for (ShardedParam* param : params)
    if (!param->available() && std::find(result.begin(), result.end(), param) == result.end()) result.push_back(param);
  return result;
}

// All-gathers all of them at once and makes them available.
int64_t gather_together(comm::Communicator& communicator, BufferPool& pool, const std::vector<ShardedParam*>& params) {
  std::vector<std::pair<at::Tensor, comm::WorkPtr>> pending;
  int64_t received = 0;
  for (ShardedParam* param : params) {
    const at::Tensor buffer = pool.take(param->padded_numel(), param->shard().options());
    param->mark_inflight();
    pending.emplace_back(buffer, communicator.all_gather(param->shard(), buffer));
    received += param->padded_numel() - param->slice_numel();
  }
  for (size_t i = 0; i < params.size(); ++i) {
    pending[i].second->wait();
    params[i]->take_full(pending[i].first);
  }
  return received;
}

void refresh_together(comm::Communicator& communicator, const std::vector<ShardedParam*>& params) {
  std::vector<comm::WorkPtr> pending;
  for (ShardedParam* param : params) pending.push_back(communicator.all_gather(param->shard(), param->buffer()));
  for (const comm::WorkPtr& work : pending) work->wait();
}

class CollectiveSource : public ShardSource {
 public:
  explicit CollectiveSource(comm::CommunicatorPtr communicator) : communicator_(std::move(communicator)) {}
  void gather(const std::vector<ShardedParam*>& params) override {
    at::NoGradGuard no_grad;
    gathered_ += gather_together(*communicator_, pool_, missing(params));
  }
  void refresh(const std::vector<ShardedParam*>& params) override { refresh_together(*communicator_, params); }
  void before_write() override {}
  void after_write() override {}
  const char* name() const override { return "collectives"; }

 private:
  comm::CommunicatorPtr communicator_;
};

class PeerSource : public ShardSource {
 public:
  PeerSource(comm::CommunicatorPtr communicator, comm::PeerMemoryPtr memory)
      : communicator_(std::move(communicator)), memory_(std::move(memory)) {
    for (int rank = 0; rank < communicator_->size(); ++rank) regions_.push_back(memory_->region(rank));
  }

  void gather(const std::vector<ShardedParam*>& params) override {
    at::NoGradGuard no_grad;
    bool first = true;
    for (ShardedParam* param : params) {
      if (param->available()) continue;
      if (first) memory_->await(version_);
      first = false;
      const at::Tensor buffer = pool_.take(param->padded_numel(), param->shard().options());
      copy(*param, buffer);
      gathered_ += param->padded_numel() - param->slice_numel();
      param->take_full(buffer);
    }
  }

  void refresh(const std::vector<ShardedParam*>& params) override {
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

class AgreedSource : public ShardSource {
 public:
  AgreedSource(comm::CommunicatorPtr communicator, std::vector<ShardedParamPtr> params)
      : communicator_(std::move(communicator)), params_(std::move(params)) {
    for (size_t i = 0; i < params_.size(); ++i) index_[params_[i].get()] = static_cast<int64_t>(i);
  }

  void gather(const std::vector<ShardedParam*>& params) override {
    at::NoGradGuard no_grad;
    for (ShardedParam* param : missing(params)) {
      const auto found = index_.find(param);
      if (found == index_.end())
        fail(ErrorKind::kRuntime, "parameter '", param->name(), "' does not belong to this engine");
      round(found->second);
    }
  }

  void drain() override {
    at::NoGradGuard no_grad;
    while (round(-1)) {
    }
  }

  void refresh(const std::vector<ShardedParam*>& params) override {
    drain();
    refresh_together(*communicator_, params);
  }
  void before_write() override { drain(); }
  void after_write() override {}
  const char* name() const override { return "agreed collectives"; }

 private:
  // One round: everybody says what it wants, everybody helps. True when somebody wanted something.
  bool round(int64_t wanted) {
    at::Tensor wants = at::empty({communicator_->size()}, at::kLong);
    wants.select(0, communicator_->rank()).fill_(wanted);
    const at::Device device = params_.empty() ? at::Device(at::kCPU) : params_[0]->shard().device();
    at::Tensor shared = wants.to(device);
    communicator_->all_gather(shared.narrow(0, communicator_->rank(), 1), shared)->wait();
    wants = shared.to(at::kCPU);
    std::vector<int64_t> all(wants.data_ptr<int64_t>(), wants.data_ptr<int64_t>() + wants.numel());
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    bool any = false;
    for (int64_t index : all) {
      if (index < 0) continue;
      any = true;
      ShardedParam& param = *params_[index];
      if (index == wanted) {
        gathered_ += gather_together(*communicator_, pool_, {&param});
        continue;
      }
      const at::Tensor buffer = pool_.take(param.padded_numel(), param.shard().options());  // for the others' sake
      communicator_->all_gather(param.shard(), buffer)->wait();
      pool_.give(buffer);
    }
    return any;
  }

  comm::CommunicatorPtr communicator_;
  std::vector<ShardedParamPtr> params_;
  std::unordered_map<const ShardedParam*, int64_t> index_;
};

}  // namespace

ShardSourcePtr collective_source(comm::CommunicatorPtr communicator) {
  return std::make_shared<CollectiveSource>(std::move(communicator));
}

ShardSourcePtr peer_source(comm::CommunicatorPtr communicator, comm::PeerMemoryPtr memory) {
  return std::make_shared<PeerSource>(std::move(communicator), std::move(memory));
}

ShardSourcePtr agreed_source(comm::CommunicatorPtr communicator, std::vector<ShardedParamPtr> params) {
  return std::make_shared<AgreedSource>(std::move(communicator), std::move(params));
}

}  // namespace ds::zero
