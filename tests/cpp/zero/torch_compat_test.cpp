// Differences between torch versions, each way on its own: a build has only one torch.
#include "zero/torch_compat.h"

#include <gtest/gtest.h>

namespace ds::zero::compat {
namespace {

struct OnlyAnswers {  // an event of torch 1.13 to 2.3
  mutable int left = 3;
  bool query() const { return --left == 0; }
};

struct Waits {  // of 2.4 and later
  mutable int waited = 0;
  bool query() const { return false; }
  void synchronize() const { ++waited; }
};

TEST(TorchCompat, AnEventThatCannotWaitIsAsked) {
  const OnlyAnswers event;
  synchronize(event);
  EXPECT_EQ(event.left, 0);
}

TEST(TorchCompat, AnEventThatCanWaitDoes) {
  const Waits event;
  synchronize(event);
  EXPECT_EQ(event.waited, 1);
}

}  // namespace
}  // namespace ds::zero::compat
