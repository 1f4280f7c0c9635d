#include "zero/step/strategies/step_strategy.h"

#include <map>

#include "base/error.h"

namespace ds::zero {

namespace {

std::map<std::string, StrategyRegistration::Make>& strategies() {
  static std::map<std::string, StrategyRegistration::Make> all;
  return all;
}

}  // namespace

StrategyRegistration::StrategyRegistration(const std::string& name, Make make) { strategies().emplace(name, make); }

std::unique_ptr<StepStrategy> make_strategy(const std::string& name, const StrategyParts& parts) {
  const auto found = strategies().find(name);
  if (found != strategies().end()) return found->second(parts);
  std::string names;
  for (const auto& [known, make] : strategies()) names += (names.empty() ? "" : ", ") + known;
  fail(ErrorKind::kValue, "there is no step strategy '", name, "'; there are: ", names);
}

}  // namespace ds::zero
