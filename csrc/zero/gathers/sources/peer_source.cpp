// Gathers from shared memory: a rank copies the slices that others have published.
#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/ranges.h"
#include "zero/gathers/row_reader.h"
#include "zero/gathers/shard_source.h"
#include "zero/rank_failures.h"

namespace ds::zero {

namespace {

// The ranks of one group, and what they have published.
class Peers {
 public:
  explicit Peers(const GatherGroup& group) : ranks_(group.ranks), memory_(group.memory) {
    // An earlier source may have used the memory.
    const comm::PeerMemory::Meeting last = memory_->meeting(ranks_->rank());
    version_ = group.published;
    round_ = finished_ = last.round;
    forward_ = last.forward;
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
  // Whether `values`, padded_numel() of them, are those that a gather brings now.
  bool equal(const ShardedParam& param, const at::Tensor& values, Values which) const {
    memory_->await(version_);
    if (!RowReader::reads_nothing(param, which)) {
      const at::Tensor now = at::empty_like(values);
      RowReader reader(which, ranks_->size());
      read(param, now, which, reader);
      reader.finish();
      return std::memcmp(now.data_ptr(), values.data_ptr(), static_cast<size_t>(now.nbytes())) == 0;
    }
    const int64_t bytes = param.row_bytes(which);
    const at::Tensor target = values.view(at::kByte);
    bool same = true;
    each_row(param, which, [&](int rank, const at::Tensor& row) {
      same = same && std::memcmp(target.narrow(0, rank * bytes, bytes).data_ptr(), row.data_ptr(),
                                 static_cast<size_t>(bytes)) == 0;
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
  // Into `buffer` when the reader has finished.
  void read(const ShardedParam& param, const at::Tensor& buffer, Values values, RowReader& reader) const {
    each_row(param, values, [&](int rank, const at::Tensor& row) { reader.add_row(param, rank, row, buffer); });
  }
  int size() const { return ranks_->size(); }
  const comm::PeerMemoryPtr& memory() const { return memory_; }

 private:
  template <typename Visit>
  void each_row(const ShardedParam& param, Values values, const Visit& visit) const {
    if (param.slice_numel() == 0) return;  // has no memory in the regions either
    const SliceLease own = param.row(values);
    const int64_t offset =
        static_cast<char*>(own.data().data_ptr()) - static_cast<char*>(regions_[ranks_->rank()].data_ptr());
    const int64_t bytes = param.row_bytes(values);
    for (int rank = 0; rank < ranks_->size(); ++rank) visit(rank, regions_[rank].narrow(0, offset, bytes));
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
    for (const GatherGroup& group : groups) {  // a memory is published once
      const auto found = find_if(peers_, [&](const Peers& known) { return known.memory() == group.memory; });
      const auto number = static_cast<size_t>(found - peers_.begin());
      for (const ShardedParamPtr& param : group.params) peers_of_[{param.get(), group.values}] = number;
      if (found == peers_.end()) peers_.emplace_back(group);
    }
  }

  // Nothing is started ahead: the copy is made by this rank's own cores, and doing it earlier saves nothing.
  void gather(const std::vector<ShardedParam*>& params, const std::vector<ShardedParam*>&, Values values) override {
    at::NoGradGuard no_grad;
    std::vector<std::pair<ShardedParam*, at::Tensor>> here;
    for (ShardedParam* param : absent(params, values))
      here.emplace_back(param, buffers_.take(param->padded_numel(), param->dtype(), param->device()));
    read(here, values);
    take_full(here, values);
  }

  // Without parameters the next gather waits.
  void refresh(const std::vector<ShardedParam*>& params, Values values) override {
    at::NoGradGuard no_grad;
    for (const Values one : {Values::kUsed, Values::kExact}) {
      std::vector<std::pair<ShardedParam*, at::Tensor>> here;
      for (ShardedParam* param : params)
        if (refreshed(*param, values) == one) here.emplace_back(param, param->buffer());
      read(here, one);
      for (const auto& [param, buffer] : here) param->note_values(one);
    }
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
    if (values.data_ptr() != param.buffer().data_ptr()) return true;
    const Values shown = param.resolved(param.shows_decoded() ? Values::kUsed : Values::kExact);
    return !peers_of(param, shown).equal(param, param.buffer(), shown);
  }
  void before_write() override {
    for (Peers& peers : peers_) peers.barrier();
  }
  void after_write() override {
    for (Peers& peers : peers_) peers.publish();
  }
  const char* name() const override { return "peer memory"; }

 private:
  Peers& peers_of(const ShardedParam& param, Values values) {
    return peers_[peers_of_.at({&param, param.resolved(values)})];
  }
  // Copies what the ranks have sent into buffers.
  void read(const std::vector<std::pair<ShardedParam*, at::Tensor>>& params, Values values) {
    Peers* last = nullptr;
    for (const auto& [param, buffer] : params) {
      Peers& peers = peers_of(*param, values);
      if (&peers != last) peers.await();
      last = &peers;
    }
    std::map<std::pair<int, Values>, RowReader> readers;  // by number of ranks
    for (const auto& [param, buffer] : params) {
      Peers& peers = peers_of(*param, values);
      const std::pair<int, Values> of{peers.size(), param->resolved(values)};
      peers.read(*param, buffer, of.second, readers.try_emplace(of, of.second, of.first).first->second);
      gathered_ += param->padded_numel() - param->slice_numel() * param->row_slices(values);
    }
    for (auto& [of, reader] : readers) reader.finish();
  }

  std::vector<Peers> peers_;
  std::map<std::pair<const ShardedParam*, Values>, size_t> peers_of_;
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
