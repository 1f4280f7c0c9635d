// Boards in a store: ranks that do not meet find out, all of them, and everything else goes on as before.
#include "comm/decorators/watched.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <condition_variable>
#include <cstdlib>

#include "../error_of.h"
#include "../on_threads.h"
#include "base/error.h"
#include "comm/transports/thread_communicator.h"

namespace ds::comm {
namespace {

// The state that ranks share that wait for each other without looking at what they call, as over a network.
struct Meeting {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, int> here;  // "number verb" -> ranks
};

class BlindCommunicator : public Communicator {
 public:
  BlindCommunicator(int rank, int size, std::shared_ptr<Meeting> meeting)
      : rank_(rank), size_(size), meeting_(std::move(meeting)) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string name() const override { return "blind"; }
  bool carries(const Op&) const override { return true; }
  PeerMemoryPtr peer_memory(int64_t) override { return nullptr; }
  void abort(const std::string& why) noexcept override {
    std::lock_guard lock(meeting_->mutex);
    aborted_ = why;
    meeting_->changed.notify_all();
  }

 protected:
  WorkPtr start(const Op& op) override {
    if (op.tag == "refused") fail(ErrorKind::kValue, "no such thing");
    if (op.tag == "broken") fail(ErrorKind::kRuntime, "the cable is gone");
    struct Meet : Work {
      Meet(BlindCommunicator& owner, std::string key) : owner(owner), key(std::move(key)) {}
      void wait() override {
        Meeting& all = *owner.meeting_;
        std::unique_lock lock(all.mutex);
        all.changed.wait(lock, [&] { return all.here[key] == owner.size_ || !owner.aborted_.empty(); });
        if (all.here[key] != owner.size_) fail(ErrorKind::kRuntime, "aborted");
      }
      BlindCommunicator& owner;
      const std::string key;
    };
    std::lock_guard lock(meeting_->mutex);
    const std::string key = std::to_string(++number_) + " " + verb_name(op.verb);
    ++meeting_->here[key];
    meeting_->changed.notify_all();
    return std::make_shared<Meet>(*this, key);
  }

 private:
  const int rank_, size_;
  const std::shared_ptr<Meeting> meeting_;
  int number_ = 0;
  std::string aborted_;
};

using Body = std::function<void(int rank, Communicator&, StoreBoard&)>;

void on_boards(int size, const Body& body, int timeout_s = 30) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto meeting = std::make_shared<Meeting>();
  on_threads(size, [&](int rank) {
    DiagnosticCallbacks callbacks;
    callbacks.stacks = [rank] { return "in the script of rank " + std::to_string(rank); };
    Watch watch(callbacks);
    GroupFacts facts;
    facts.name = "tested";
    const auto board = std::make_shared<StoreBoard>(store, rank, size, std::chrono::seconds(timeout_s), "blind", facts);
    watch.add(board);
    const auto communicator = watched(std::make_shared<BlindCommunicator>(rank, size, meeting), board);
    body(rank, *communicator, *board);
  });
}

class Boards : public testing::TestWithParam<int> {};

TEST_P(Boards, RanksThatCallDifferentThingsAllFailWithWhereTheyAre) {
  on_boards(GetParam(), [](int rank, Communicator& communicator, StoreBoard&) {
    const at::Tensor ten = at::ones({10});
    communicator.all_reduce(ten, ReduceOp::kSum)->wait();
    const auto began = std::chrono::steady_clock::now();
    const std::string text = error_of(ErrorKind::kRuntime, [&] {
      if (rank == 1) {
        communicator.broadcast(ten, 0, "late")->wait();
      } else {
        communicator.all_reduce(ten, ReduceOp::kSum)->wait();
      }
    });
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(8));
    for (const char* part : {"call different collectives:", "rank 1 broadcast(10 x float32, root 0) of \"late\"",
                             "Number 2 of this group", "in all_reduce(10 x float32, sum), number 2, for",
                             "in the script of rank 1", "The last collectives of all ranks are in"})
      EXPECT_TRUE(says(text, part));
    bool other = false;  // which of them was seen to call the other thing depends on who came first
    for (int named = 0; named < GetParam(); ++named)
      other |= named != 1 && says(text, "rank " + std::to_string(named) + " all_reduce(10 x float32, sum)");
    EXPECT_TRUE(other) << text;
    EXPECT_TRUE(says(error_of(ErrorKind::kRuntime, [&] { communicator.barrier(); }), "has failed before"));
  });
}

TEST_P(Boards, WhatBreaksOnOneRankIsToldToAll) {
  on_boards(GetParam(), [](int rank, Communicator& communicator, StoreBoard&) {
    const at::Tensor one = at::ones({1});
    const std::string text = error_of(
        ErrorKind::kRuntime, [&] { communicator.all_reduce(one, ReduceOp::kSum, rank == 0 ? "broken" : "")->wait(); });
    EXPECT_TRUE(says(text, "all_reduce(1 x float32, sum) of \"broken\" failed on rank 0: the cable is gone"));
  });
}

TEST_P(Boards, ACallThatItsCallerGotWrongBreaksNothing) {
  on_boards(GetParam(), [](int, Communicator& communicator, StoreBoard& board) {
    const at::Tensor one = at::ones({1});
    error_of(ErrorKind::kValue, [&] { communicator.all_reduce(one, ReduceOp::kSum, "refused"); });
    communicator.barrier();
    communicator.all_reduce(one, ReduceOp::kSum);  // nobody waits
    const auto flights = board.flights();
    ASSERT_EQ(flights.size(), 3u);
    for (size_t i = 0; i < flights.size(); ++i) {
      EXPECT_EQ(flights[i].number, static_cast<int64_t>(i) + 1);
      EXPECT_GT(flights[i].end_us, 0);
    }
    EXPECT_TRUE(board.failed().empty());
    EXPECT_EQ(board.transport(), "blind");
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, Boards, testing::Values(2, 5));

TEST(WatchedCommunicator, StrictRanksCompareBeforeTheyStart) {
  setenv("DS_COMM_FINGERPRINTS", "strict", 1);
  on_boards(3, [](int rank, Communicator& communicator, StoreBoard&) {
    for (int i = 0; i < 5; ++i) communicator.barrier();
    const std::string text = error_of(
        ErrorKind::kRuntime, [&] { communicator.all_reduce(at::ones({rank == 2 ? 3 : 4}), ReduceOp::kSum)->wait(); });
    EXPECT_TRUE(says(text,
                     "rank 0 all_reduce(4 x float32, sum); rank 1 all_reduce(4 x float32, sum); rank 2 "
                     "all_reduce(3 x float32, sum)"))
        << text;
  });
  on_boards(3, [](int rank, Communicator& communicator, StoreBoard&) {
    // Rank r gives rank s s + 1 elements; as many in all are taken by rank 2, others from each.
    const std::vector<int64_t> give{1, 2, 3}, take(3, rank + 1), wrong{2, 3, 4};
    const std::string text = error_of(ErrorKind::kRuntime, [&] {
      communicator.all_to_all(at::ones({6}), give, at::ones({3 * (rank + 1)}), rank == 2 ? wrong : take)->wait();
    });
    EXPECT_TRUE(says(text, "a rank gives another one more or less than that one takes from it (split sizes)"));
  });
  unsetenv("DS_COMM_FINGERPRINTS");
}

// Names of hosts do not tell hosts apart: containers and cloned machines have the same.
TEST(StoreBoard, AProcessNumberOfAnotherHostIsNotAskedFor) {
  const pid_t child = fork();
  if (child == 0) _exit(0);
  waitpid(child, nullptr, 0);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  StoreBoard board(store, 0, 2, std::chrono::seconds(30), "tested", GroupFacts());
  setenv("DS_HOST_ID", "another host of the same name", 1);
  const StoreBoard elsewhere(store, 1, 2, std::chrono::seconds(30), "tested", GroupFacts());
  unsetenv("DS_HOST_ID");
  const std::vector<uint8_t> told = store->get("who1");
  const std::string who(told.begin(), told.end());
  const std::string ended = std::to_string(child) + who.substr(who.find(' '));
  store->set("who1", std::vector<uint8_t>(ended.begin(), ended.end()));
  EXPECT_TRUE(says(board.give_up("tested"), "rank 1: does not answer"));
}

TEST(WatchedCommunicator, TransfersGoByUnseen) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto plain = thread_communicators(2);
  on_threads(2, [&](int rank) {
    const auto board = std::make_shared<StoreBoard>(store, rank, 2, std::chrono::seconds(30), "threads", GroupFacts());
    const auto communicator = watched(plain[rank], board);
    const at::Tensor tensor = at::full({3}, rank);
    if (rank == 0) communicator->send(tensor, 1)->wait();
    if (rank == 1) communicator->recv(tensor, 0)->wait();
    EXPECT_EQ(tensor.sum().item<int64_t>(), 0);
    communicator->barrier();
    EXPECT_EQ(board->flights().size(), 1u);
  });
}

}  // namespace
}  // namespace ds::comm
