#include "comm/shared_memory/process_peer_memory.h"

#include <ATen/Functions.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/process.h"
#include "comm/segments/shared_segments.h"

namespace ds::comm {

namespace {

// The first page of each segment; the region follows.
struct Header {
  std::atomic<int64_t> version;
  std::atomic<int64_t> closed;
  std::atomic<int64_t> round;
  std::atomic<int64_t> forward;
  std::atomic<int64_t> idle;  // -1 while it reads, else 0
  std::atomic<int64_t> finished;
};
constexpr int64_t kHeaderBytes = 4096;
static_assert(sizeof(Header) <= kHeaderBytes && std::atomic<int64_t>::is_always_lock_free);

class ProcessPeerMemory : public PeerMemory {
 public:
  ProcessPeerMemory(int rank, std::shared_ptr<SharedSegments> segments, int64_t bytes, LookAfter look_after)
      : rank_(rank), segments_(std::move(segments)), bytes_(bytes), look_after_(std::move(look_after)) {}
  ~ProcessPeerMemory() override {
    if (owner_.here()) header(rank_)->closed = 1;
  }

  at::Tensor region(int rank) override {
    return at::from_blob(
        static_cast<char*>(segments_->data(rank)) + kHeaderBytes, {bytes_}, [segments = segments_](void*) {},
        at::TensorOptions().dtype(at::kByte));
  }

  void publish() override { header(rank_)->version.fetch_add(1, std::memory_order_release); }

  void await(int64_t version) override { await(&Header::version, version); }

  void come_to(const Meeting& meeting) override {
    header(rank_)->forward.store(meeting.forward, std::memory_order_relaxed);
    header(rank_)->round.store(meeting.round, std::memory_order_release);
  }
  Meeting meeting(int rank) override {
    const int64_t round = header(rank)->round.load(std::memory_order_acquire);
    return {round, header(rank)->forward.load(std::memory_order_relaxed)};
  }
  void await_round(int64_t round) override { await(&Header::round, round); }
  void set_reading(bool reading, int64_t finished) override {
    header(rank_)->idle.store(reading ? -1 : 0, std::memory_order_release);
    header(rank_)->finished.store(finished, std::memory_order_release);
  }
  void await_readers(int64_t finished) override {
    await(&Header::finished, finished, /*but=*/rank_);
    await(&Header::idle, 0, /*but=*/rank_);
  }

 private:
  void await(std::atomic<int64_t> Header::*count, int64_t wanted, int but = -1) {
    const auto since = Clock::now();
    for (int rank = 0; rank < segments_->size(); ++rank) {
      if (rank == but) continue;
      for (int64_t looks = 0; (header(rank)->*count).load(std::memory_order_acquire) < wanted; ++looks) {
        if (looks < 200) {
          std::this_thread::yield();
          continue;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(50));
        if (looks % 1000 != 0) continue;
        check_alive(rank);
        if (look_after_) look_after_(rank, since);
      }
    }
  }

  Header* header(int rank) const { return static_cast<Header*>(segments_->data(rank)); }

  void check_alive(int rank) const {
    const char* why = !segments_->alive(rank) ? ") has ended"
                      : header(rank)->closed  ? ") has closed its engine"
                                              : nullptr;
    if (why)
      fail(ErrorKind::kRuntime, "rank ", rank, " (process ", segments_->pid(rank), why,
           " while its part of the parameters was waited for");
  }

  int rank_;
  std::shared_ptr<SharedSegments> segments_;
  int64_t bytes_;
  LookAfter look_after_;
  const OwningProcess owner_;
};

}  // namespace

Rendezvous rendezvous_over(Communicator& group) {
  Rendezvous made;
  made.exchange = [&group](const SegmentFacts& mine) {
    constexpr int64_t kWords = sizeof(SegmentFacts) / sizeof(int64_t);
    const at::Tensor facts = at::zeros({group.size(), kWords}, at::kLong);
    std::vector<SegmentFacts> all(group.size());
    std::memcpy(facts.data_ptr<int64_t>() + kWords * group.rank(), &mine, sizeof(mine));
    group.all_gather(facts.select(0, group.rank()), facts)->wait();
    std::memcpy(all.data(), facts.data_ptr(), sizeof(SegmentFacts) * all.size());
    return all;
  };
  made.all = [&group](bool ok) {
    const at::Tensor agreed = at::full({1}, ok ? 1 : 0, at::kInt);
    group.all_reduce(agreed, ReduceOp::kMin)->wait();
    return agreed.item<int>() != 0;
  };
  return made;
}

PeerMemoryPtr process_peer_memory(Communicator& group, int64_t bytes, LookAfter look_after) {
  auto segments = SharedSegments::create(group.rank(), group.size(), kHeaderBytes + bytes, rendezvous_over(group));
  if (!segments) return nullptr;
  return std::make_shared<ProcessPeerMemory>(group.rank(), std::move(segments), bytes, std::move(look_after));
}

}  // namespace ds::comm
