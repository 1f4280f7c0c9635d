#include "comm/transports/thread_communicator.h"

#include <ATen/Functions.h>

#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "base/condition_variable.h"
#include "base/error.h"
#include "base/ranges.h"
#include "comm/calls/compose.h"
#include "comm/boards/record.h"

namespace ds::comm {

namespace {

// Regions of all ranks; ranks that wait sleep until a version changes.
struct SharedRegions {
  std::mutex mutex;
  ConditionVariable changed;
  std::vector<at::Tensor> regions;
  std::vector<int64_t> versions;
  std::vector<PeerMemory::Meeting> meetings;
  std::vector<std::pair<bool, int64_t>> reading;  // of each rank, and up to which round it has read
  bool closed = false;
};

// Messages that a rank has sent to another one and that were not received yet.
struct Mailbox {
  std::deque<at::Tensor> messages;
  int64_t sent = 0, expected = 0;  // how many; how many receives have been issued
};

// One collective at a time: ranks post what they want to do, the last to come does it for all, all leave.
class Meeting {
 public:
  explicit Meeting(int size) : size_(size), ops_(size), calls_(size) {}

  void meet(int rank, const Op& op) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return broken_ || !leaving_; });
    if (broken_) fail_broken();
    ops_[rank] = op;
    calls_[rank] = record_of(op, rank, size_);
    const int64_t round = round_;
    if (++present_ == size_) {
      error_.clear();
      for (int other = 1; other < size_; ++other)
        if (!fits(calls_[other], calls_[0]))
          error_ = "collectives differ: rank 0 called " + describe(calls_[0]) + ", rank " + std::to_string(other) +
                   " called " + describe(calls_[other]);
      if (error_.empty()) error_ = run();
      leaving_ = true;
      changed_.notify_all();
    } else {
      changed_.wait(lock, [&] { return broken_ || (leaving_ && round_ == round); });
      if (broken_ && !leaving_) fail_broken();
    }
    const std::string error = error_;
    ops_[rank] = {};
    if (--present_ == 0) {
      leaving_ = false;
      ++round_;
      changed_.notify_all();
    }
    lock.unlock();
    if (!error.empty()) fail(ErrorKind::kRuntime, error);
  }

  void send(int from, int to, const at::Tensor& tensor) {
    std::lock_guard lock(mutex_);
    if (broken_) fail_broken();
    Mailbox& box = mail_[{from, to}];
    box.messages.push_back(tensor.clone());
    ++box.sent;
    changed_.notify_all();
  }
  // The number of the message that it will take.
  int64_t expect(int from, int to) {
    std::lock_guard lock(mutex_);
    return mail_[{from, to}].expected++;
  }
  void take(int from, int to, int64_t number, const at::Tensor& tensor) {
    std::unique_lock lock(mutex_);
    Mailbox& box = mail_[{from, to}];
    changed_.wait(lock, [&] { return broken_ || box.sent > number; });
    if (box.sent <= number) fail_broken();
    at::Tensor& message = box.messages[box.messages.size() - static_cast<size_t>(box.sent - number)];
    if (message.numel() != tensor.numel() || message.scalar_type() != tensor.scalar_type())
      fail(ErrorKind::kRuntime, "rank ", from, " sent ", text_of(message), ", rank ", to, " receives ",
           text_of(tensor));
    tensor.view({-1}).copy_(message.view({-1}));
    message = at::Tensor();
    while (!box.messages.empty() && !box.messages.front().defined()) box.messages.pop_front();
  }

  std::shared_ptr<SharedRegions> shared_regions(int rank, int64_t bytes) {
    std::lock_guard lock(mutex_);
    if (!regions_) {
      regions_ = std::make_shared<SharedRegions>();
      regions_->regions.resize(size_);
      regions_->versions.assign(size_, 0);
      regions_->meetings.assign(size_, {});
      regions_->reading.assign(size_, {});
    }
    regions_->regions[rank] = at::zeros({bytes}, at::TensorOptions().dtype(at::kByte));
    return regions_;
  }
  void forget_regions() {
    std::lock_guard lock(mutex_);
    regions_.reset();
  }

  std::shared_ptr<Meeting> among(const std::vector<int>& ranks) {
    std::lock_guard lock(mutex_);
    auto& made = subsets_[ranks];
    if (!made) made = std::make_shared<Meeting>(static_cast<int>(ranks.size()));
    return made;
  }

  void leave_for_good(const std::string& why = "another rank has left the group") {
    std::lock_guard lock(mutex_);
    if (!broken_) why_ = why;
    broken_ = true;
    changed_.notify_all();
  }

 private:
  [[noreturn]] void fail_broken() { fail(ErrorKind::kRuntime, why_); }

  static std::string text_of(const at::Tensor& tensor) {
    return std::to_string(tensor.numel()) + " x " + c10::toString(tensor.scalar_type());
  }
  // Runs the call of all ranks. Returns the error, or "".
  std::string run() {
    const Verb verb = ops_[0].verb;
    if (verb == Verb::kBarrier) return "";
    if (verb == Verb::kAllReduce) {
      std::vector<at::Tensor> parts;
      for (const Op& op : ops_) parts.push_back(op.out.view({-1}));
      const at::Tensor result = at::empty_like(parts[0]);
      reduce_parts(result, parts, ops_[0].reduce);
      for (const at::Tensor& part : parts) part.copy_(result);
    } else if (verb == Verb::kBroadcast) {
      for (const Op& op : ops_)
        if (&op != &ops_[op.peer]) op.out.view({-1}).copy_(ops_[op.peer].out.view({-1}));
    } else if (verb == Verb::kAllGather) {
      for (const Op& op : ops_) {
        const auto rows = parts_of(op.out, op.out_counts, size_);
        for (int from = 0; from < size_; ++from)
          if (rows[from].data_ptr() != ops_[from].in.data_ptr()) rows[from].copy_(ops_[from].in.reshape({-1}));
      }
    } else if (verb == Verb::kReduceScatter) {
      std::vector<at::Tensor> results;
      for (int rank = 0; rank < size_; ++rank) {
        std::vector<at::Tensor> parts;
        for (const Op& op : ops_) parts.push_back(parts_of(op.in, op.in_counts, size_)[rank]);
        results.push_back(at::empty_like(ops_[rank].out));
        reduce_parts(results[rank], parts, ops_[rank].reduce);
      }
      for (int rank = 0; rank < size_; ++rank) ops_[rank].out.copy_(results[rank]);
    } else {
      for (int to = 0; to < size_; ++to)
        for (int from = 0; from < size_; ++from) {
          const at::Tensor given = parts_of(ops_[from].in, ops_[from].in_counts, size_)[to];
          const at::Tensor taken = parts_of(ops_[to].out, ops_[to].out_counts, size_)[from];
          if (given.numel() != taken.numel() || given.scalar_type() != taken.scalar_type())
            return "all_to_all: rank " + std::to_string(from) + " gives rank " + std::to_string(to) + " " +
                   text_of(given) + ", which takes " + text_of(taken);
          taken.copy_(given);
        }
    }
    return "";
  }

  const int size_;
  std::mutex mutex_;
  ConditionVariable changed_;
  std::vector<Op> ops_;
  std::vector<Record> calls_;
  std::map<std::pair<int, int>, Mailbox> mail_;  // by sender and receiver
  std::string error_;
  int present_ = 0;
  int64_t round_ = 0;
  std::map<std::vector<int>, std::shared_ptr<Meeting>> subsets_;
  std::shared_ptr<SharedRegions> regions_;  // while peer_memory() collects them
  bool leaving_ = false;
  bool broken_ = false;
  std::string why_;
};

class ThreadPeerMemory : public PeerMemory {
 public:
  ThreadPeerMemory(std::shared_ptr<SharedRegions> shared, int rank) : shared_(std::move(shared)), rank_(rank) {}
  ~ThreadPeerMemory() override {
    std::lock_guard lock(shared_->mutex);
    shared_->closed = true;
    shared_->changed.notify_all();
  }
  at::Tensor region(int rank) override {
    std::lock_guard lock(shared_->mutex);
    return shared_->regions[rank];
  }
  void publish() override {
    std::lock_guard lock(shared_->mutex);
    ++shared_->versions[rank_];
    shared_->changed.notify_all();
  }
  void await(int64_t version) override {
    await([version](const SharedRegions& shared) {
      return all_of(shared.versions, [version](int64_t theirs) { return theirs >= version; });
    });
  }
  void come_to(const Meeting& meeting) override {
    std::lock_guard lock(shared_->mutex);
    shared_->meetings[rank_] = meeting;
    shared_->changed.notify_all();
  }
  Meeting meeting(int rank) override {
    std::lock_guard lock(shared_->mutex);
    return shared_->meetings[rank];
  }
  void await_round(int64_t round) override {
    await([round](const SharedRegions& shared) {
      return all_of(shared.meetings, [round](const Meeting& theirs) { return theirs.round >= round; });
    });
  }
  void set_reading(bool reading, int64_t finished) override {
    std::lock_guard lock(shared_->mutex);
    shared_->reading[rank_] = {reading, finished};
    shared_->changed.notify_all();
  }
  void await_readers(int64_t finished) override {
    await([this, finished](const SharedRegions& shared) {
      for (size_t rank = 0; rank < shared.reading.size(); ++rank) {
        const auto& [reading, theirs] = shared.reading[rank];
        if ((reading || theirs < finished) && static_cast<int>(rank) != rank_) return false;
      }
      return true;
    });
  }

 private:
  template <typename Ready>
  void await(const Ready& ready) {
    std::unique_lock lock(shared_->mutex);
    shared_->changed.wait(lock, [&] { return ready(*shared_) || shared_->closed; });
    if (!ready(*shared_)) fail(ErrorKind::kRuntime, "another rank has left the group");
  }

  std::shared_ptr<SharedRegions> shared_;
  int rank_;
};

class Arrival : public Work {
 public:
  Arrival(std::shared_ptr<Meeting> meeting, int from, int to, at::Tensor tensor)
      : meeting_(std::move(meeting)),
        from_(from),
        to_(to),
        number_(meeting_->expect(from, to)),
        tensor_(std::move(tensor)) {}
  void wait() override {
    if (!meeting_) return;
    std::exchange(meeting_, nullptr)->take(from_, to_, number_, tensor_);
  }

 private:
  std::shared_ptr<Meeting> meeting_;
  const int from_, to_;
  const int64_t number_;
  const at::Tensor tensor_;
};

class ThreadCommunicator : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<Meeting> meeting, int rank, int size, bool peer_memory)
      : meeting_(std::move(meeting)), rank_(rank), size_(size), peer_memory_(peer_memory) {}
  ~ThreadCommunicator() override { meeting_->leave_for_good(); }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string name() const override { return "threads"; }

  bool carries(const Op& op) const override {
    switch (op.verb) {
      case Verb::kAllReduce:
      case Verb::kBroadcast:
      case Verb::kReduceScatter:
      case Verb::kAllGather:
      case Verb::kAllToAll:
      case Verb::kSend:
      case Verb::kRecv: return op.peer != kAnyRank;
      case Verb::kBarrier: return true;
      default: return false;
    }
  }
  PeerMemoryPtr peer_memory(int64_t bytes) override {
    if (!peer_memory_) return nullptr;
    const auto shared = meeting_->shared_regions(rank_, bytes);
    barrier();
    if (rank_ == 0) meeting_->forget_regions();
    barrier();
    return std::make_shared<ThreadPeerMemory>(shared, rank_);
  }
  void abort(const std::string& why) noexcept override { meeting_->leave_for_good(why); }
  CommunicatorPtr among(const std::vector<int>& ranks) override {
    const auto mine = index_of(ranks, rank_);
    return std::make_shared<ThreadCommunicator>(meeting_->among(ranks), static_cast<int>(mine),
                                                static_cast<int>(ranks.size()), false);
  }

 protected:
  WorkPtr start(const Op& op) override {
    if (op.verb == Verb::kRecv) return std::make_shared<Arrival>(meeting_, op.peer, rank_, op.out);
    if (op.verb == Verb::kSend) {
      meeting_->send(rank_, op.peer, op.in);
    } else {
      meeting_->meet(rank_, op);
    }
    return std::make_shared<DoneWork>();
  }

 private:
  std::shared_ptr<Meeting> meeting_;
  int rank_, size_;
  bool peer_memory_;
};

}  // namespace

std::vector<CommunicatorPtr> thread_communicators(int size, bool peer_memory) {
  auto meeting = std::make_shared<Meeting>(size);
  std::vector<CommunicatorPtr> ranks;
  for (int rank = 0; rank < size; ++rank)
    ranks.push_back(std::make_shared<ThreadCommunicator>(meeting, rank, size, peer_memory));
  return ranks;
}

}  // namespace ds::comm
