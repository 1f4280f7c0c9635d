// The accumulation window: the micro-batches whose gradients make one step of the optimizer.
//
// [Note: facts and answers] A window is told facts: the accumulation steps, the loss scale, the weight of a dynamic
// batch, a boundary set by hand, whether the script is inside of no_sync, and what happens (forwards, backwards,
// steps). It answers whether a backward reduces, by which factor the gradients of a script's own backward are to be
// multiplied, whether the step is due, and how many micro-batches the step has. Nobody else counts micro-steps.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "zero/gradients/micro_steps.h"

namespace ds::zero {

enum class WindowState : uint8_t {
  kOpen,          // a micro-step begins
  kForwarded,     // a forward that trains has ended
  kOwnBackward,   // a backward that the engine has started runs
  kUserBackward,  // a backward that the script has started runs, or has raised
  kEnded,         // a backward has ended
  kStepping,      // engine.step() runs
  kStepped,       // the weights are updated; the hooks at the end of the step have not run
};
constexpr size_t kWindowStates = 7;

const char* name_of(WindowState state);
bool may_follow(WindowState from, WindowState to);

struct WindowFacts {
  int64_t accumulation_steps = 1;
  double loss_scale = 1.0;
  double weight = 1.0;           // of the loss of this micro-batch
  bool each_micro_step = false;  // the ranks reduce in each micro-step (StagePolicy::reduce)
  bool managed = true;           // false: each step is a boundary, and reduces
  // A pipeline's schedule says when gradients are reduced: nothing is at a boundary unless that is set by hand.
  bool scheduled = false;
  bool in_backward = true;  // false: the step reduces, or the script
  bool no_sync = false;
  bool scaled = false;          // the script has multiplied its loss by the loss scale; until the end of the micro-step
  double outside_factor = 1.0;  // by which another engine has multiplied its loss; until the next forward
  std::optional<bool> by_hand;  // whether the next step is at a boundary
  std::optional<bool> answered;  // the same, by a method that a script has replaced; goes before `by_hand`

  double missing_scale() const { return (scaled ? 1.0 : loss_scale) / outside_factor; }
};

// Factors of the gradients of a script's own backward, which starts with the loss as the script wrote it.
struct WindowFactors {
  double at_outputs = 1.0;    // of gradients that come to an output of forward
  double at_params = 1.0;     // of gradients that arrive at a parameter
  bool misses_scale = false;  // the loss scale is not 1 and has come in nowhere
};

// Calls come from one thread, apart from those of a backward's hooks, which may run in one thread per device: `state`,
// `factors`, and reach() of the counts.
class Window {
 public:
  WindowFacts& facts() { return facts_; }
  const WindowFacts& facts() const { return facts_; }
  MicroSteps& counts() { return counts_; }
  const MicroSteps& counts() const { return counts_; }

  // ---- what happens ------------------------------------------------------------------------------------------------
  int64_t forwarded(bool seen);  // MicroSteps::add_forward
  void begin_own();
  void begin_user(bool scale_at_outputs);
  void end_backward();
  void drop_backward();  // it has raised
  void begin_step();
  void fail_step();  // it has raised: the micro-step goes on
  // Counts the micro-step, or all of a schedule. At a `boundary` the window ends with it.
  void end_step(bool boundary);
  bool close_step();  // true once after each step at a boundary
  void restart();     // a new window; what was counted in this one is forgotten

  // ---- answers -----------------------------------------------------------------------------------------------------
  WindowState state() const { return state_; }
  bool own_backward() const { return state() == WindowState::kOwnBackward; }
  bool user_backward() const { return state() == WindowState::kUserBackward; }
  bool in_backward() const { return own_backward() || user_backward(); }
  bool at_boundary() const;       // whether the next step updates the weights
  bool reduces() const;           // whether the next backward adds up gradients over the ranks
  WindowFactors factors() const;  // of the script's backward that runs
  bool needs_join() const;        // no backward of the engine in this micro-step, and no schedule that reduces
  int64_t micro_batches() const;  // of the step under way, which is at a boundary
  int64_t last_micro_batches() const { return last_micro_batches_; }  // of the last step at a boundary

 private:
  void enter(WindowState next);

  WindowFacts facts_;
  MicroSteps counts_;
  std::atomic<WindowState> state_{WindowState::kOpen};
  WindowState before_step_ = WindowState::kOpen;
  bool scale_at_outputs_ = false;
  int64_t last_micro_batches_ = 1;
};

}  // namespace ds::zero
