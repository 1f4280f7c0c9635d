// Rank 0 keeps the job's store until the others need it no more.
#include "comm/boards/store_keeper.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "comm/segments/shared_segments.h"

namespace ds::comm {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kSoon(5);  // StoreKeeper::kMost is two minutes

int ended_process() {
  const int child = fork();
  if (child == 0) _exit(0);
  waitpid(child, nullptr, 0);
  return child;
}

void let_go_soon(StoreKeeper& keeper, const c10::intrusive_ptr<c10d::Store>& store) {
  const auto deadline = Clock::now() + kSoon;
  while (store.use_count() > 1 && Clock::now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(store.use_count(), 1U) << "the store is still kept";
  if (store.use_count() == 1) keeper.wait();
}

TEST(StoreKeeper, KeepsTheStoreUntilTheOthersSayGoodbye) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  StoreKeeper first(store, 0, 2);
  StoreKeeper other(store, 1, 2);
  first.goodbye();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(store.use_count(), 3U);
  other.goodbye();
  EXPECT_TRUE(other.said_goodbye());
  let_go_soon(first, store);
}

TEST(StoreKeeper, KeepsTheStoreUntilAProcessOfThisHostHasEnded) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  const std::string theirs = std::to_string(host_id()) + " " + std::to_string(ended_process());
  StoreKeeper first(store, 0, 2);
  store->set("deepspeed/process/1", std::vector<uint8_t>(theirs.begin(), theirs.end()));
  first.goodbye();
  let_go_soon(first, store);
}

// A script changes the environment while the keeper's thread runs: a reader may then read memory that setenv has given
// back. So the thread uses the environment of the moment when the keeper was made.
TEST(StoreKeeper, ItsThreadDoesNotReadTheEnvironment) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  const std::string theirs = std::to_string(host_id()) + " " + std::to_string(ended_process());
  StoreKeeper first(store, 0, 2);
  setenv("DS_HOST_ID", "another host", 1);
  store->set("deepspeed/process/1", std::vector<uint8_t>(theirs.begin(), theirs.end()));
  first.goodbye();
  let_go_soon(first, store);
  unsetenv("DS_HOST_ID");
}

}  // namespace
}  // namespace ds::comm
