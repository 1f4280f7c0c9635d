// The accumulation window against a plain model, which keeps a list of what happened and works out everything from it.
// DS_FUZZ_CASES sets the number of random sequences instead of 100 000.
#include "zero/gradients/window.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../error_of.h"

namespace ds::zero {
namespace {

// A forward that a backward has used.
struct Used {
  int64_t forward;  // its number; 0: not known
};

void tell(Window& window, int64_t steps, double scale, double weight) {
  window.facts().accumulation_steps = steps;
  window.facts().loss_scale = scale;
  window.facts().weight = weight;
}

// The requests of a script, as one process without accumulation windows would do it.
struct Plain {
  int64_t steps = 1;  // of accumulation
  bool managed = true, each = false, in_backward = true, no_sync = false;
  std::optional<bool> by_hand;
  int64_t calls = 0, begin = 0;  // of engine.step(), and where the window began
  int64_t forwards = 0;
  std::vector<std::vector<Used>> window;   // of each micro-step up to now, the last one under way
  std::vector<bool> own, hidden, trained;  // of each micro-step
  double gradient = 0.0;                   // of a parameter that is the loss itself

  Plain() { open(); }
  void open() {
    window.emplace_back();
    own.push_back(false);
    hidden.push_back(false);
    trained.push_back(false);
  }
  void restart() {
    calls = begin;
    window.clear(), own.clear(), hidden.clear(), trained.clear();
    gradient = 0.0;
    open();
  }
  bool boundary() const { return by_hand ? *by_hand : static_cast<int64_t>(window.size()) >= steps; }
  bool reduces() const { return !no_sync && (each || (managed && in_backward && boundary())); }
  int64_t counted(size_t micro) const {
    std::set<int64_t> known;
    for (const Used& used : window[micro]) known.insert(used.forward);
    known.erase(0);
    return std::max<int64_t>(static_cast<int64_t>(known.size()), own[micro] || hidden[micro] ? 1 : 0);
  }
  int64_t all_counted() const {
    int64_t sum = 0;
    for (size_t micro = 0; micro < window.size(); ++micro) sum += counted(micro);
    return sum;
  }
};

// Runs the calls of a script on a window as the engine does, and on the plain model.
class Script {
 public:
  explicit Script(unsigned seed) : random_(seed) {
    plain_.each = one_in(2);
    plain_.managed = !one_in(4);
    window_.facts().each_micro_step = plain_.each;
    window_.facts().managed = plain_.managed;
    tell();
  }

  void run() {
    using Call = void (Script::*)();
    constexpr Call kCalls[] = {
        &Script::forward, &Script::forward, &Script::own_backward,  &Script::own_backward, &Script::user_backward,
        &Script::step,    &Script::step,    &Script::no_sync,       &Script::by_hand,      &Script::in_backward,
        &Script::scale,   &Script::sizes,   &Script::save_and_load, &Script::set_counter,  &Script::zero_grad};
    const int calls = 3 + pick(30);
    for (int i = 0; i < calls && !testing::Test::HasFailure(); ++i) {
      const int call = pick(std::size(kCalls));
      said_ += std::to_string(call) + " ";
      (this->*kCalls[call])();
      compare();
    }
  }

 private:
  int pick(int below) { return static_cast<int>(random_() % below); }
  bool one_in(int cases) { return pick(cases) == 0; }

  void tell() { ds::zero::tell(window_, plain_.steps, scale_, weight_); }

  void forward() {
    weight_ = 0.5 + pick(3);
    tell();
    const bool seen = !one_in(5);
    if (window_.user_backward()) window_.drop_backward();
    last_ = window_.forwarded(seen);
    EXPECT_EQ(last_, ++plain_.forwards);
    seen_ = seen;
    plain_.trained.back() = true;
    plain_.hidden.back() = plain_.hidden.back() || !seen;
  }

  // The reducer of this rank: what is here and not reduced, and what is.
  void arrive(double gradient) { (reducing_ ? reduced_ : local_) += gradient; }
  void begin(bool reduces) {
    EXPECT_EQ(reduces, plain_.reduces());
    reducing_ = reduces;
    if (reduces) reduced_ += std::exchange(local_, 0.0);
  }

  void own_backward() {
    if (window_.user_backward()) window_.drop_backward();
    tell();
    window_.begin_own();
    const bool raises = one_in(6), known = last_ > 0 && seen_;
    if (known) window_.counts().reach(last_);
    EXPECT_EQ(window_.factors().at_outputs, 1.0);
    if (raises) return window_.drop_backward();
    begin(window_.reduces());
    arrive(weight_ / plain_.steps * scale_);  // engine.backward multiplies the loss itself
    window_.end_backward();
    plain_.own.back() = true;
    plain_.window.back().push_back({known ? last_ : 0});
    plain_.gradient += weight_ / plain_.steps;
  }

  void user_backward() {
    if (last_ == 0 || !seen_) return;
    if (window_.in_backward()) window_.drop_backward();
    window_.begin_user(window_.facts().missing_scale() != 1.0);
    const bool reduces = window_.reduces();
    const WindowFactors factors = window_.factors();
    EXPECT_FALSE(factors.misses_scale);
    // Hooks of two devices.
    if (one_in(40)) {
      double other_factor = 0.0;
      std::thread other([&] {
        window_.counts().reach(last_);
        other_factor = window_.factors().at_params;
      });
      window_.counts().reach(last_);
      EXPECT_EQ(window_.factors().at_outputs, factors.at_outputs);
      other.join();
      EXPECT_EQ(other_factor, factors.at_params);
    }
    window_.counts().reach(last_);
    if (one_in(6)) return;  // it raises: nobody is told
    begin(reduces);
    arrive((scaled_ ? scale_ : 1.0) * factors.at_outputs * factors.at_params);
    window_.end_backward();
    plain_.window.back().push_back({last_});
    plain_.gradient += weight_ / plain_.steps;
  }

  void scale() {
    window_.facts().scaled = true;
    scaled_ = true;
  }

  void step() {
    if (plain_.no_sync) return;
    const bool boundary = plain_.boundary() || !plain_.managed;
    EXPECT_EQ(window_.at_boundary() || !window_.facts().managed, boundary);
    if (window_.user_backward()) window_.drop_backward();
    const WindowState before = window_.state();
    window_.begin_step();
    EXPECT_EQ(window_.state(), WindowState::kStepping);
    EXPECT_EQ(window_.needs_join(), !plain_.own.back());
    const int64_t reached = plain_.all_counted();
    const int64_t expected =
        plain_.managed ? static_cast<int64_t>(plain_.window.size()) : std::max<int64_t>(1, reached);
    EXPECT_EQ(window_.micro_batches(), expected);
    if (one_in(8)) {
      window_.fail_step();
      EXPECT_EQ(window_.state(), before == WindowState::kStepped ? WindowState::kOpen : before);
      return;
    }
    window_.end_step(boundary);
    ++plain_.calls;
    scaled_ = false;
    if (!boundary) return plain_.open();
    EXPECT_EQ(window_.last_micro_batches(), expected);
    EXPECT_TRUE(window_.close_step());
    EXPECT_FALSE(window_.close_step());
    reduced_ += std::exchange(local_, 0.0);
    EXPECT_NEAR(reduced_ / scale_, plain_.gradient, 1e-9 * (1.0 + std::abs(plain_.gradient)));
    plain_.begin = plain_.calls;
    plain_.restart();
    reduced_ = 0.0;
    scale_ = one_in(2) ? 1.0 : 1024.0;
    tell();
  }

  void no_sync() { window_.facts().no_sync = plain_.no_sync = !plain_.no_sync; }
  void by_hand() {
    plain_.by_hand = one_in(3) ? std::nullopt : std::optional<bool>(one_in(2));
    window_.facts().by_hand = plain_.by_hand;
  }
  void in_backward() { window_.facts().in_backward = plain_.in_backward = !plain_.in_backward; }

  void sizes() {
    if (window_.counts().trained() > 0 || local_ != 0.0 || reduced_ != 0.0) return;  // refused
    plain_.steps = 1 + pick(4);
    tell();
  }

  void forget() {
    if (window_.in_backward()) window_.drop_backward();
    local_ = reduced_ = 0.0;
  }

  void save_and_load() {
    const int64_t saved = window_.counts().window_begin(), lost = window_.counts().trained();
    EXPECT_EQ(saved, plain_.begin);
    EXPECT_EQ(lost, std::max<int64_t>(static_cast<int64_t>(plain_.window.size()) - 1, plain_.all_counted()));
    if (one_in(2)) return;
    forget();
    window_.restart();
    plain_.restart();
    window_.counts().set_total(saved + 10);
    plain_.begin = plain_.calls = saved + 10;
    scaled_ = false;
    tell();
  }

  void set_counter() {
    window_.counts().set_total(100);
    const int64_t index = static_cast<int64_t>(plain_.window.size()) - 1;
    plain_.calls = 100;
    plain_.begin = 100 - index;
  }

  void zero_grad() {
    forget();
    plain_.gradient = 0.0;
  }

  void compare() {
    EXPECT_EQ(window_.counts().total(), plain_.calls) << said_;
    EXPECT_EQ(window_.counts().index(), static_cast<int64_t>(plain_.window.size()) - 1) << said_;
    EXPECT_EQ(window_.counts().micro_batches(), plain_.all_counted()) << said_;
    EXPECT_EQ(window_.at_boundary(), plain_.boundary()) << said_;
    EXPECT_EQ(window_.reduces(), plain_.reduces()) << said_;
    EXPECT_EQ(window_.counts().has_forward(), plain_.trained.back()) << said_;
    EXPECT_NEAR((local_ + reduced_) / scale_, plain_.gradient, 1e-9 * (1.0 + std::abs(plain_.gradient))) << said_;
  }

  Window window_;
  Plain plain_;
  std::mt19937 random_;
  std::string said_;
  double scale_ = 1.0, weight_ = 1.0;
  bool scaled_ = false, seen_ = false, reducing_ = false;
  int64_t last_ = 0;
  double local_ = 0.0, reduced_ = 0.0;
};

TEST(Window, RandomSequencesEqualAPlainModel) {
  const char* asked = std::getenv("DS_FUZZ_CASES");
  const int cases = asked ? std::atoi(asked) : 100000;
  for (int seed = 0; seed < cases && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    Script(static_cast<unsigned>(seed)).run();
  }
}

TEST(Window, ASchedulesMicroBatchesAreCountedAtItsStep) {
  Window window;
  window.facts().scheduled = true;
  window.facts().accumulation_steps = 4;
  EXPECT_FALSE(window.at_boundary());
  EXPECT_FALSE(window.reduces());
  window.facts().by_hand = true;
  EXPECT_TRUE(window.reduces());
  EXPECT_FALSE(window.needs_join());
  window.begin_step();
  window.end_step(true);
  window.facts().by_hand.reset();
  EXPECT_EQ(window.counts().total(), 4);
  EXPECT_EQ(window.counts().index(), 0);
  EXPECT_EQ(window.last_micro_batches(), 4);
  EXPECT_FALSE(window.at_boundary());
}

// See python/deepspeed/engine/cross_engine_scaling.py.
TEST(Window, AnotherEnginesBackwardBringsItsFactor) {
  Window window;
  tell(window, 2, 8.0, 1.0);
  window.forwarded(true);
  EXPECT_TRUE(window.factors().misses_scale);  // no backward has come to an output
  window.facts().outside_factor = 4.0;
  EXPECT_FALSE(window.factors().misses_scale);
  window.begin_user(window.facts().missing_scale() != 1.0);
  EXPECT_EQ(window.factors().at_outputs, 2.0);
  EXPECT_EQ(window.factors().at_params, 0.5);
  window.end_backward();
  window.facts().outside_factor = 8.0;
  EXPECT_EQ(window.facts().missing_scale(), 1.0);
  window.forwarded(true);
  EXPECT_EQ(window.facts().missing_scale(), 8.0);
}

TEST(Window, AReplacedAnswerHoldsUntilTheStep) {
  Window window;
  window.facts().accumulation_steps = 2;
  window.facts().by_hand = false;
  window.facts().answered = true;
  EXPECT_TRUE(window.at_boundary());
  EXPECT_TRUE(window.reduces());
  window.begin_step();
  window.end_step(true);
  EXPECT_FALSE(window.at_boundary());
}

TEST(Window, ABackwardInsideOfABackwardIsRefused) {
  Window window;
  window.begin_own();
  EXPECT_NE(error_of([&] { window.begin_own(); }).find("cannot go from the state 'backward of the engine'"),
            std::string::npos);
  for (size_t from = 0; from < kWindowStates; ++from)
    EXPECT_EQ(may_follow(static_cast<WindowState>(from), WindowState::kStepped),
              static_cast<WindowState>(from) == WindowState::kStepping);
}

}  // namespace
}  // namespace ds::zero
