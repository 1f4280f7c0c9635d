// The wall time of training steps, divided into phases.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"

namespace ds {

// The last ones, but kRest, are waits.
enum class Phase : uint8_t {
  kData,
  kForward,
  kBackward,
  kOptimizer,
  kCheckpoint,
  kCommunication,  // for other ranks, except of the next two
  kReduction,      // of gradients
  kGathers,        // of parameters
  kOffload,        // for other tiers of memory
  kRest,           // no phase is open
};
// Their names, in the same order, also for Python.
constexpr std::array kPhaseNames{"data",          "forward",   "backward", "optimizer", "checkpoint",
                                 "communication", "reduction", "gathers",  "offload",   "rest"};
constexpr size_t kPhases = kPhaseNames.size();
static_assert(kPhases == static_cast<size_t>(Phase::kRest) + 1);

// A stack of phases: one that begins pauses the one around it, so the times of all phases add up to the wall time,
// exactly. Communication inside of another wait belongs to that one.
//
// It counts the time of one thread: of the last forward, backward or optimizer phase that began while none was open.
// Phases of other threads are ignored: they run beside the training. Each engine has one. Off, it costs one comparison.
class StepClock {
 public:
  using Now = std::function<Clock::time_point()>;
  explicit StepClock(Now now = Clock::now) : now_(std::move(now)) {}
  StepClock(const StepClock&) = delete;

  // Each user of the times switches it on once and off once; it is on while there is a user.
  void turn(bool on);
  bool on() const { return users_.load(std::memory_order_relaxed) > 0; }

  // The mark ends the phase, and those inside of it that have not ended. 0: the phase is not counted.
  size_t enter(Phase phase);
  void leave(size_t mark);
  void leave_last(Phase phase);  // the innermost phase of this kind, where there is one
  bool in_phase();               // this thread is counted, and a phase is open

  // Nanoseconds since the first phase began, up to now.
  struct Totals {
    std::array<int64_t, kPhases> all{}, in_backward{};  // by phase; the second: while a backward was open
    int64_t wall = 0;
    int64_t begun = 0;  // phases; what the clock costs is this times the cost of one
  };
  Totals totals();

  // While it is there, this thread runs what the counted one waits for: an operation of backward.
  class Guest {
   public:
    explicit Guest(StepClock& clock) : clock_(clock), host_(clock.count_thread(std::this_thread::get_id())) {}
    ~Guest() { clock_.count_thread(host_); }
    Guest(const Guest&) = delete;

   private:
    StepClock& clock_;
    const std::thread::id host_;
  };

 private:
  void count();  // up to now, for the open phase
  std::thread::id count_thread(std::thread::id thread);

  const Now now_;
  std::atomic<int> users_{0};
  std::mutex mutex_;  // of what follows
  std::thread::id thread_;
  std::vector<Phase> open_;
  bool begun_ = false;
  Clock::time_point last_;
  Totals totals_;
};
using StepClockPtr = std::shared_ptr<StepClock>;

// A phase as long as it is there.
class InPhase {
 public:
  InPhase(StepClock& clock, Phase phase) : clock_(clock), mark_(clock.on() ? clock.enter(phase) : 0) {}
  ~InPhase() {
    if (mark_) clock_.leave(mark_);
  }
  InPhase(const InPhase&) = delete;

 private:
  StepClock& clock_;
  const size_t mark_;
};

}  // namespace ds
