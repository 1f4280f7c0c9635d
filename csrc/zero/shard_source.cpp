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
int64_t gather_together(comm::Communicator& communicator, storage::ScratchPool& pool,
                        const std::vector<ShardedParam*>& params) {
  std::vector<std::pair<at::Tensor, comm::WorkPtr>> pending;
  int64_t received = 0;
  for (ShardedParam* param : params) {
    const at::Tensor buffer = pool.take(param->padded_numel(), param->shard().options());
    param->mark_inflight();
    pending.emplace_back(buffer, communicator.all_gather(param->shard(), buffer, param->name()));
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
  for (ShardedParam* param : params)
    pending.push_back(communicator.all_gather(param->shard(), param->buffer(), param->name()));
  for (const comm::WorkPtr& work : pending) work->wait();
}

class CollectiveSource : public ShardSource {
 public:
  explicit CollectiveSource(comm::CommunicatorPtr communicator) : communicator_(std::move(communicator)) {}
  void gather(const std::vector<ShardedParam*>& params, const std::vector<ShardedParam*>&) override {
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

  // Nothing is started ahead: the copy is made by this rank's own cores, and doing it earlier saves nothing.
  void gather(const std::vector<ShardedParam*>& params, const std::vector<ShardedParam*>&) override {
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

class AgreedSource : public ShardSource {
 public:
  AgreedSource(comm::CommunicatorPtr communicator, std::vector<ShardedParamPtr> params)
      : communicator_(std::move(communicator)), params_(std::move(params)) {
    for (size_t i = 0; i < params_.size(); ++i) index_[params_[i].get()] = static_cast<int64_t>(i);
  }

  void gather(const std::vector<ShardedParam*>& params, const std::vector<ShardedParam*>& ahead) override {
    at::NoGradGuard no_grad;
    std::vector<ShardedParam*> absent;
    for (ShardedParam* param : missing(params))
      if (!started_.count(param)) absent.push_back(param);
    for (size_t begin = 0; begin < absent.size(); begin += kWants) {
      std::vector<int64_t> wants;
      for (size_t i = begin; i < std::min(absent.size(), begin + kWants); ++i) wants.push_back(index_of(*absent[i]));
      for (ShardedParam* param : ahead)
        if (wants.size() < kWants && !param->available() && !started_.count(param)) wants.push_back(index_of(*param));
      round(wants);
    }
    for (ShardedParam* param : missing(params)) {
      const auto found = started_.find(param);
      found->second.work->wait();
      param->take_full(found->second.buffer);
      started_.erase(found);
    }
  }

  bool looks_ahead() const override { return true; }

  void forget_ahead() override {
    for (auto& [param, transfer] : started_) {
      transfer.work->wait();
      pool_.give(transfer.buffer);
    }
    started_.clear();
  }

  void drain() override {
    at::NoGradGuard no_grad;
    while (round({})) {
    }
  }

  void refresh(const std::vector<ShardedParam*>& params) override {
    drain();
    refresh_together(*communicator_, params);
  }
  void before_write() override {
    drain();
    forget_ahead();
  }
  void after_write() override {}
  const char* name() const override { return "agreed collectives"; }

 private:
  static constexpr size_t kWants = 32;  // of one rank in one round
  struct Transfer {
    at::Tensor buffer;
    comm::WorkPtr work;
  };

  int64_t index_of(const ShardedParam& param) const {
    const auto found = index_.find(&param);
    if (found == index_.end())
      fail(ErrorKind::kRuntime, "parameter '", param.name(), "' does not belong to this engine");
    return found->second;
  }

  // One round: everybody says what it wants, everybody helps. True when somebody wanted something.
  bool round(const std::vector<int64_t>& wants) {
    const auto row = static_cast<int64_t>(kWants);
    at::Tensor host = at::full({communicator_->size(), row}, -1, at::kLong);
    std::copy(wants.begin(), wants.end(), host.data_ptr<int64_t>() + communicator_->rank() * row);
    const at::Device device = params_.empty() ? at::Device(at::kCPU) : params_[0]->shard().device();
    const at::Tensor shared = host.to(device);
    communicator_->all_gather(shared.select(0, communicator_->rank()), shared, "what ranks want to gather")->wait();
    host = shared.to(at::kCPU);
    std::vector<int64_t> all(host.data_ptr<int64_t>(), host.data_ptr<int64_t>() + host.numel());
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    if (!all.empty() && all.front() < 0) all.erase(all.begin());
    std::vector<Transfer> for_others;
    for (int64_t index : all) {
      ShardedParam& param = *params_[index];
      Transfer transfer{pool_.take(param.padded_numel(), param.shard().options()), nullptr};
      transfer.work = communicator_->all_gather(param.shard(), transfer.buffer, param.name());
      if (std::find(wants.begin(), wants.end(), index) != wants.end()) {
        gathered_ += param.padded_numel() - param.slice_numel();
        started_[&param] = transfer;
      } else {
        for_others.push_back(transfer);
      }
    }
    for (const Transfer& transfer : for_others) {
      transfer.work->wait();
      pool_.give(transfer.buffer);
    }
    return !all.empty();
  }

  comm::CommunicatorPtr communicator_;
  std::vector<ShardedParamPtr> params_;
  std::unordered_map<const ShardedParam*, int64_t> index_;
  std::unordered_map<const ShardedParam*, Transfer> started_;
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
