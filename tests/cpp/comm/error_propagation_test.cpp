// One rank's failure ends the waits of all, with one text.
#include "comm/boards/error_propagation.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../error_of.h"
#include "comm/segments/shared_segments.h"

namespace ds::comm {
namespace {

struct Ranks {
  explicit Ranks(int count) {
    for (int rank = 0; rank < count; ++rank)
      all.push_back(std::make_unique<ErrorPropagation>(
          store, rank, std::vector<std::string>{"stage 0", "stage 1", "stage 2"},
          [this, rank](const std::string& why) { told[rank] += why; },
          PositionNames{{"ForwardPass"}, {"layer 0 (A)", "layer 1 (B)"}}));
  }
  void look() {
    std::this_thread::sleep_for(std::chrono::milliseconds(260));  // they look four times a second
    for (auto& rank : all) rank->look({});
  }
  c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  std::map<int, std::string> told;
  std::vector<std::unique_ptr<ErrorPropagation>> all;
};

TEST(ErrorPropagation, ReachesAllWorkingRanks) {
  Ranks ranks(3);
  ranks.all[1]->begin();
  ranks.look();
  EXPECT_TRUE(ranks.told.empty());
  EXPECT_EQ(ranks.all[2]->report("the layer is broken"), "the layer is broken");
  EXPECT_EQ(ranks.all[0]->report("nobody came"), "the layer is broken");  // the first text counts
  ranks.look();
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(ranks.told[rank], "the layer is broken");
  EXPECT_EQ(ranks.all[1]->error(), "the layer is broken");
  ranks.all[1]->await_delivery();  // all have received it
}

TEST(ErrorPropagation, IdleRanksAreNotDisturbed) {
  Ranks ranks(3);
  ranks.all[2]->report("the layer is broken");
  ranks.look();
  EXPECT_EQ(ranks.told.count(0), 0u);
  EXPECT_EQ(ranks.all[0]->error(), "");
  ranks.all[0]->begin();
  ranks.look();
  EXPECT_EQ(ranks.told[0], "the layer is broken");
}

TEST(ErrorPropagation, AProcessThatEndedIsReported) {
  for (const bool goodbye : {false, true}) {
    Ranks ranks(2);
    const pid_t child = fork();
    if (child == 0) _exit(0);
    waitpid(child, nullptr, 0);
    const std::string who = std::to_string(child) + " " + std::to_string(host_id());
    ranks.store->set("who2", std::vector<uint8_t>(who.begin(), who.end()));
    ranks.store->add("known2", 1);
    if (goodbye) ranks.store->add("left2", 1);
    ranks.look();
    EXPECT_TRUE(ranks.told.empty());
    ranks.all[0]->begin();
    ranks.look();
    EXPECT_EQ(ranks.told.count(0), goodbye ? 0u : 1u);
    if (goodbye) continue;
    EXPECT_TRUE(says(ranks.told[0], "stage 2 (process " + std::to_string(child) + ") has ended"));
  }
}

// Names of hosts do not tell hosts apart: containers and cloned machines have the same.
TEST(ErrorPropagation, AProcessNumberOfAnotherHostIsNotAskedFor) {
  const pid_t child = fork();
  if (child == 0) _exit(0);
  waitpid(child, nullptr, 0);
  Ranks ranks(2);
  setenv("DS_HOST_ID", "another host of the same name", 1);
  const ErrorPropagation elsewhere(ranks.store, 2, {"stage 0", "stage 1", "stage 2"}, nullptr);
  unsetenv("DS_HOST_ID");
  const std::vector<uint8_t> told = ranks.store->get("who2");
  const std::string who(told.begin(), told.end());
  const std::string ended = std::to_string(child) + who.substr(who.find(' '));
  ranks.store->set("who2", std::vector<uint8_t>(ended.begin(), ended.end()));
  ranks.all[0]->begin();
  ranks.look();
  EXPECT_TRUE(ranks.told.empty()) << ranks.told[0];
}

TEST(ErrorPropagation, SaysWhereAKilledProcessWas) {
  Ranks ranks(2);
  int there[2], here[2];
  ASSERT_EQ(pipe(there) + pipe(here), 0);
  const pid_t child = fork();
  if (child == 0) {
    PositionPage page;
    page.words()[PositionPage::kInstruction] = 1;
    page.words()[PositionPage::kMicroBatch] = 4;
    page.words()[PositionPage::kLayer] = 2;
    const SharedFile file = page.file();
    char byte = 0;
    const bool told = write(there[1], &file, sizeof(file)) == sizeof(file);
    _exit(told && read(here[0], &byte, 1) == 1 ? 0 : 1);
  }
  SharedFile file;
  ASSERT_EQ(read(there[0], &file, sizeof(file)), static_cast<ssize_t>(sizeof(file)));
  const std::string who = std::to_string(child) + " " + std::to_string(host_id()) + " " + std::to_string(file.file) +
                          " " + std::to_string(file.nonce);
  ranks.store->set("who2", std::vector<uint8_t>(who.begin(), who.end()));
  ranks.store->add("known2", 1);
  ranks.all[0]->begin();
  ranks.all[0]->position()->words()[PositionPage::kInstruction] = 1;
  ranks.look();
  const std::string position = "layer 1 (B), micro-batch 3, ForwardPass";
  EXPECT_EQ(ranks.all[0]->where(), "stage 0: ForwardPass; stage 2: " + position);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  ranks.look();
  EXPECT_TRUE(
      says(ranks.told[0], "has ended in the middle of a batch, in " + position + "; stage 0 has seen it first"));
  for (const int end : {there[0], there[1], here[0], here[1]}) close(end);
}

// Ends with the process that has it.
class MortalStore : public c10d::HashStore {
 public:
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    look();
    HashStore::set(key, value);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    look();
    return HashStore::get(key);
  }
  int64_t add(const std::string& key, int64_t value) override {
    look();
    return HashStore::add(key, value);
  }
  bool has_ended = false;

 private:
  void look() const {
    if (has_ended) throw std::runtime_error("connection reset by peer");
  }
};

TEST(ErrorPropagation, ARankWhoseProcessHadTheStore) {
  const std::string ended = "the pipeline failed: stage 0 has ended in the middle of a batch",
                    gone = ": the job's store, which its process had, has gone";
  const auto text = [](int keeper, bool elsewhere, bool seen) {
    const auto store = c10::make_intrusive<MortalStore>();
    std::string told;
    const auto made = [&](int rank) {
      return std::make_unique<ErrorPropagation>(
          store, rank, std::vector<std::string>{"stage 0", "stage 1"}, [&](const std::string& why) { told += why; },
          PositionNames{{"ForwardPass"}, {"layer 0 (A)"}}, keeper);
    };
    const auto first = made(0);
    if (elsewhere) {
      const std::string who = "12 another-host -1";
      store->set("who0", std::vector<uint8_t>(who.begin(), who.end()));
    }
    const auto second = made(1);  // it meets the keeper now, so on this host no look is needed
    for (auto* rank : {first.get(), second.get()}) rank->begin();
    first->position()->words()[PositionPage::kLayer] = 1;
    if (seen)
      for (auto* rank : {first.get(), second.get()}) rank->look({});
    store->has_ended = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(260));
    second->look({});
    EXPECT_EQ(told, second->error());
    return told;
  };
  EXPECT_EQ(text(0, true, false), ended + gone);
  EXPECT_EQ(text(0, false, false), ended + ", last seen in layer 0 (A)" + gone);
  EXPECT_EQ(text(0, false, true), ended + ", last seen in layer 0 (A)" + gone);
  EXPECT_EQ(text(0, true, true), ended + ", last seen in layer 0 (A)" + gone);
  EXPECT_EQ(text(-1, false, true), "the pipeline failed: the job's store has gone");
}

}  // namespace
}  // namespace ds::comm
