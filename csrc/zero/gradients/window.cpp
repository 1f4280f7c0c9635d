#include "zero/gradients/window.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/error.h"

namespace ds::zero {

namespace {

using State = WindowState;

// The states that may follow each state, as bits.
constexpr unsigned bit(State state) { return 1u << static_cast<unsigned>(state); }
constexpr unsigned kBackwards = bit(State::kOwnBackward) | bit(State::kUserBackward);
// Scripts make forwards, backwards and steps in any order, and forget what they have at any time.
constexpr unsigned kAnyCall = bit(State::kOpen) | bit(State::kForwarded) | kBackwards | bit(State::kStepping);
constexpr std::array<unsigned, kWindowStates> kFollowers = {
    kAnyCall,  // kOpen: a graph of an earlier micro-step may have a backward; a step may have none
    kAnyCall,  // kForwarded
    // A backward ends, or raises and leaves the micro-step as it was before it. A step during one is refused, and a
    // model may run another forward inside of it.
    bit(State::kEnded) | bit(State::kForwarded) | bit(State::kOpen),  // kOwnBackward
    bit(State::kEnded) | bit(State::kForwarded) | bit(State::kOpen),  // kUserBackward
    kAnyCall,                                                         // kEnded
    // A step that raises leaves the micro-step as it was before it.
    bit(State::kStepped) | bit(State::kOpen) | bit(State::kForwarded) | bit(State::kEnded),  // kStepping
    kAnyCall,                                                                                // kStepped
};

}  // namespace

const char* name_of(State state) {
  constexpr std::array<const char*, kWindowStates> kNames = {
      "open", "forwarded", "backward of the engine", "backward of the script", "ended", "stepping", "stepped"};
  return kNames[static_cast<size_t>(state)];
}

bool may_follow(State from, State to) { return (kFollowers[static_cast<size_t>(from)] & bit(to)) != 0; }

void Window::enter(State next) {
  const State now = state();
  if (!may_follow(now, next))
    fail(ErrorKind::kRuntime, "an accumulation window cannot go from the state '", name_of(now), "' to '",
         name_of(next), "'");
  state_ = next;
}

// ---- what happens ---------------------------------------------------------------------------------------------------

int64_t Window::forwarded(bool seen) {
  facts_.outside_factor = 1.0;
  if (!in_backward() && state() != State::kStepping) enter(State::kForwarded);
  return counts_.add_forward(seen);
}

void Window::begin_own() {
  enter(State::kOwnBackward);
  scale_at_outputs_ = false;
}

void Window::begin_user(bool scale_at_outputs) {
  enter(State::kUserBackward);
  scale_at_outputs_ = scale_at_outputs;
  counts_.add_backward(false);  // one that raises has reduced with the other ranks, too
}

void Window::end_backward() {
  if (!in_backward()) return;
  if (own_backward()) counts_.add_backward(true);
  enter(State::kEnded);
  scale_at_outputs_ = false;
  counts_.keep_reached();
}

void Window::drop_backward() {
  if (in_backward()) enter(counts_.has_forward() ? State::kForwarded : State::kOpen);
  scale_at_outputs_ = false;
  counts_.drop_reached();
}

void Window::begin_step() {
  if (in_backward() || state() == State::kStepping) return;  // the step finds that the backward has raised
  before_step_ = state() == State::kStepped ? State::kOpen : state();
  enter(State::kStepping);
}

void Window::fail_step() {
  if (state() == State::kStepping) enter(before_step_);
}

void Window::end_step(bool boundary) {
  if (boundary) last_micro_batches_ = micro_batches();
  counts_.end(boundary, facts_.scheduled && boundary ? facts_.accumulation_steps : 1);
  if (state() == State::kStepping) enter(boundary ? State::kStepped : State::kOpen);
  facts_.scaled = false;
  facts_.answered.reset();
}

bool Window::close_step() {
  if (state() != State::kStepped) return false;
  enter(State::kOpen);
  return true;
}

void Window::restart() {
  counts_.restart();
  facts_.scaled = scale_at_outputs_ = false;
  if (in_backward() || state() == State::kForwarded || state() == State::kEnded) enter(State::kOpen);
}

// ---- answers --------------------------------------------------------------------------------------------------------

bool Window::at_boundary() const {
  if (facts_.answered) return *facts_.answered;
  if (facts_.by_hand) return *facts_.by_hand;
  return !facts_.scheduled && counts_.index() + 1 >= facts_.accumulation_steps;
}

bool Window::reduces() const {
  if (facts_.no_sync) return false;
  return facts_.each_micro_step || (facts_.managed && facts_.in_backward && at_boundary());
}

WindowFactors Window::factors() const {
  const double scale = facts_.missing_scale();
  WindowFactors found;
  found.at_outputs = scale_at_outputs_ ? scale : 1.0;
  found.at_params =
      (scale_at_outputs_ ? 1.0 : scale) * (facts_.weight / static_cast<double>(facts_.accumulation_steps));
  found.misses_scale = !scale_at_outputs_ && scale != 1.0 && facts_.outside_factor == 1.0;
  return found;
}

bool Window::needs_join() const { return !counts_.has_own_backward() && !facts_.scheduled; }

int64_t Window::micro_batches() const {
  if (facts_.scheduled) return facts_.accumulation_steps;
  return facts_.managed ? counts_.index() + 1 : std::max<int64_t>(1, counts_.micro_batches());
}

}  // namespace ds::zero
