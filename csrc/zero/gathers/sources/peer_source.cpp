// Gathers from shared memory: a rank copies the slices that others have published.
#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/ranges.h"
#include "zero/gathers/shard_source.h"
#include "zero/rank_failures.h"

namespace ds::zero {

namespace {

// The ranks of one group, and what they have published.
class Peers {
 public:
  explicit Peers(GatherGroup group) : ranks_(std::move(group.ranks)), memory_(std::move(group.memory)) {
    for (int rank = 0; rank < ranks_->size(); ++rank) regions_.push_back(memory_->region(rank));
  }

  void await() {
    memory_->await(version_);
    refuse_missed(forward_);
  }
  void barrier() {
    refuse_missed(forward_);
    ranks_->barrier();
  }
  // See ShardSource::meet_writes. The round of a rank is how often it has met the others.
  bool meet(bool wrote, int64_t forward) {
    forward_ = forward;
    if (ranks_->size() == 1) return wrote;
    end_reading();  // of a forward that raised
    refuse_missed(forward - 1);
    int64_t latest = round_ + (wrote ? 1 : 0);
    for (int rank = 0; rank < ranks_->size(); ++rank) {
      const comm::PeerMemory::Meeting theirs = memory_->meeting(rank);
      // A rank that is ahead waits for a later forward of this one.
      if (wrote || theirs.forward <= forward) latest = std::max(latest, theirs.round);
    }
    const bool meets = latest > round_;
    if (meets) {
      round_ = latest;
      memory_->come_to({round_, forward});
      memory_->await_round(round_);
    }
    memory_->set_reading(true, finished_);
    memory_->come_to({round_, forward});  // it is seen behind the line above
    return meets;
  }
  void publish() {
    memory_->publish();
    ++version_;
  }
  // Whether `values`, padded_numel() of them, are those of the slices.
  bool equal(const ShardedParam& param, const at::Tensor& values) const {
    bool same = true;
    each_slice(param, values, [&](const at::Tensor& mine, const at::Tensor& theirs) {
      same = same && std::memcmp(mine.data_ptr(), theirs.data_ptr(), static_cast<size_t>(mine.numel())) == 0;
    });
    return same;
  }
  void end_reading() {
    finished_ = round_;
    memory_->set_reading(false, finished_);
  }
  // Before a write of the user. Others may still be on their way to the forward that this rank has ended; ranks need
  // not have as many forwards, so that they are waited for only once, and for a moment.
  void await_readers() {
    if (ranks_->size() == 1) return;
    if (std::exchange(waited_, forward_) != forward_) {
      const auto end = Clock::now() + milliseconds(1000);
      for (int rank = 0; rank < ranks_->size(); ++rank)
        while (memory_->meeting(rank).forward < forward_ && Clock::now() < end)
          std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    memory_->await_readers(round_);
  }
  void look() const { refuse_missed(forward_); }
  void copy(const ShardedParam& param, const at::Tensor& buffer) const {
    each_slice(param, buffer, [](const at::Tensor& mine, const at::Tensor& theirs) { mine.copy_(theirs); });
  }

 private:
  template <typename Visit>
  void each_slice(const ShardedParam& param, const at::Tensor& buffer, const Visit& visit) const {
    if (param.slice_numel() == 0) return;  // has no memory in the regions either
    const SliceLease own = param.slice(storage::Access::kRead);
    const int64_t offset =
        static_cast<char*>(own.data().data_ptr()) - static_cast<char*>(regions_[ranks_->rank()].data_ptr());
    const int64_t bytes = param.slice_bytes();
    const at::Tensor target = buffer.view(at::kByte);
    for (int rank = 0; rank < ranks_->size(); ++rank)
      visit(target.narrow(0, rank * bytes, bytes), regions_[rank].narrow(0, offset, bytes));
  }
  // This rank has come to forward number `forward`, and another one has written to its slice before that one.
  void refuse_missed(int64_t forward) const {
    for (int rank = 0; rank < ranks_->size() && ranks_->size() > 1; ++rank) {
      const comm::PeerMemory::Meeting theirs = memory_->meeting(rank);
      if (theirs.round <= round_ || theirs.forward > forward) continue;
      throw LoneFailure(
          ErrorKind::kRuntime,
          "rank " + std::to_string(rank) +
              " has written to its slices of parameters (param.ds_tensor) before forward " +
              std::to_string(theirs.forward) +
              " of its engine, which this rank had begun already without a write of its own, so it may have read the "
              "old values. Call torch.distributed.barrier() on all ranks between the writes and the forward, or let "
              "every rank write to its slices");
    }
  }

  comm::CommunicatorPtr ranks_;
  comm::PeerMemoryPtr memory_;
  std::vector<at::Tensor> regions_;
  int64_t version_ = 0, round_ = 0, finished_ = 0, forward_ = 0, waited_ = 0;
};

class PeerSource : public ShardSource {
 public:
  PeerSource(std::vector<GatherGroup> groups, std::shared_ptr<storage::ShardStorage> storage)
      : ShardSource(std::move(storage)) {
    for (GatherGroup& group : groups) {
      for (const ShardedParamPtr& param : group.params) peers_of_[param.get()] = peers_.size();
      peers_.emplace_back(std::move(group));
    }
  }

  // Nothing is started ahead: the copy is made by this rank's own cores, and doing it earlier saves nothing.
  void gather(const std::vector<ShardedParam*>& params, const std::vector<ShardedParam*>&) override {
    at::NoGradGuard no_grad;
    std::vector<std::pair<ShardedParam*, at::Tensor>> here;
    const std::vector<ShardedParam*> wanted = absent(params);
    await(wanted);
    for (ShardedParam* param : wanted) {
      here.emplace_back(param, buffers_.take(param->padded_numel(), param->dtype(), param->device()));
      copy(*param, here.back().second);
    }
    take_full(here);
  }

  void refresh(const std::vector<ShardedParam*>& params) override {  // without any, the next gather waits
    at::NoGradGuard no_grad;
    await(params);
    for (ShardedParam* param : params) copy(*param, param->buffer());
  }
  bool meet_writes(bool wrote, int64_t forward) override {
    bool met = false;
    for (Peers& peers : peers_) met = peers.meet(wrote, forward) || met;
    return met;
  }
  void end_forward() override {
    for (Peers& peers : peers_) peers.end_reading();
  }
  void before_slice_write() override {
    end_forward();  // a forward that raised
    for (Peers& peers : peers_) peers.await_readers();
  }
  void drain() override {
    for (Peers& peers : peers_) peers.look();
  }
  bool differs(const ShardedParam& param) override {
    const at::Tensor values = param.gathered();
    if (!values.defined() || !param.buffer().defined()) return false;
    return values.data_ptr() != param.buffer().data_ptr() || !peers_of(param).equal(param, param.buffer());
  }
  void before_write() override {
    for (Peers& peers : peers_) peers.barrier();
  }
  void after_write() override {
    for (Peers& peers : peers_) peers.publish();
  }
  const char* name() const override { return "peer memory"; }

 private:
  Peers& peers_of(const ShardedParam& param) { return peers_[peers_of_.at(&param)]; }
  void await(const std::vector<ShardedParam*>& params) {
    Peers* last = nullptr;
    for (const ShardedParam* param : params) {
      Peers& peers = peers_of(*param);
      if (&peers != last) peers.await();
      last = &peers;
    }
  }
  void copy(const ShardedParam& param, const at::Tensor& buffer) {
    peers_of(param).copy(param, buffer);
    gathered_ += param.padded_numel() - param.slice_numel();
  }

  std::vector<Peers> peers_;
  std::unordered_map<const ShardedParam*, size_t> peers_of_;
};

bool all_have_memory(const SourceParts& parts) {
  return all_of(parts.groups, [](const GatherGroup& group) { return group.memory != nullptr; });
}

// Copies from the owners' memory, in which the shards of every parameter lie at the same offset.
ShardSourcePtr make_peers(SourceParts parts) {
  return std::make_shared<PeerSource>(std::move(parts.groups), std::move(parts.storage));
}

const ShardSourceRegistration peer_registration({"peer memory", 10, &all_have_memory, &make_peers});

}  // namespace

}  // namespace ds::zero
