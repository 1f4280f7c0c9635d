// Everything in every step.
#include "zero/step/strategies/step_strategy.h"

namespace ds::zero {

namespace {

class Plain : public StepStrategy {
 public:
  std::vector<UpdatePart> parts(const StepInputs&) override { return {UpdatePart{}}; }
};

const StrategyRegistration registration("plain", [](const StrategyParts&) -> std::unique_ptr<StepStrategy> {
  return std::make_unique<Plain>();
});

}  // namespace

}  // namespace ds::zero
