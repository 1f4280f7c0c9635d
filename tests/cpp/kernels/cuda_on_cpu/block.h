// A thread of the host runs blocks, one after the other; the threads of a block are fibers, which take turns.
#pragma once
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "fiber.h"
#include "memory.h"
#include "runtime.h"

namespace cuda_on_cpu {

enum class Order { kForward, kReverse, kRandom, kOtherRandom };
constexpr int kOrders = 4;

class Machine {
 public:
  Machine();
  ~Machine();
  // That of the calling thread.
  static Machine& own();

  // All blocks once. Empty, or what is wrong.
  std::string run(const Grid& grid, const std::function<void()>& body, Order order, uint64_t seed);
  AccessLog& log() { return log_; }

  // From the thread that runs:
  const Position& position() const { return current_->position; }
  void wait_block(Site site);
  uint64_t wait_warp(bool shuffles, unsigned mask, uint64_t bits, unsigned lane, Site site);
  void* shared_array(const void* declaration, size_t bytes, size_t alignment, Site site);
  void* dynamic_shared() { return shared_.dynamic(); }

 private:
  enum class State { kNew, kReady, kRunning, kAtBlock, kAtSyncWarp, kAtShuffle, kDone };
  struct Thread {
    Position position;
    State state;
    Site site;
    unsigned mask, lane;    // of a warp that waits
    uint64_t bits, result;  // of a shuffle
    Fiber* fiber;
  };

  void run_block(unsigned block);
  void give_turn(Thread& thread);
  void suspend(State state, Site site);
  [[noreturn]] void fail(std::string text);
  // Wakes whom nothing holds any more; false: nobody.
  bool wake();
  bool wake_warp(size_t first);
  std::string why_stuck() const;
  static bool at_warp(const Thread& thread) {
    return thread.state == State::kAtShuffle || thread.state == State::kAtSyncWarp;
  }
  static std::string name(const Thread& thread) {
    return "thread " + std::to_string(thread.position.thread.x) + " of block " +
           std::to_string(thread.position.block.x);
  }
  Fiber* fiber_for(const Thread& thread);

  Grid grid_ = {};
  const std::function<void()>* body_ = nullptr;
  Order order_ = Order::kForward;
  std::mt19937 random_;
  std::vector<Thread> threads_;
  std::vector<unsigned> turns_;
  Thread* current_ = nullptr;
  std::string error_;

  char* stacks_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
  unsigned rotation_ = 0;

  SharedMemory shared_;
  AccessLog log_;
  Watch watch_;

  // For the thread sanitizer: addresses that stand for the barriers of a block, each of its own, so that blocks have no
  // order. Of two that follow each other none is the same: who leaves one may not see what others do before the next.
  struct Barriers {
    char block[2][8], warp[kMostThreads / kWarp][2][8];
  };
  std::vector<Barriers> barriers_;
  Barriers* barrier_ = nullptr;
  unsigned block_turn_ = 0, warp_turn_[kMostThreads / kWarp] = {};
  char began_[8], ended_[8];
};

}  // namespace cuda_on_cpu
