#include "zero/spaces/rules/space_rule.h"

#include <map>
#include <utility>

#include "base/error.h"

namespace ds::zero {

namespace {

std::map<std::string, SpaceRule>& rules() {
  static std::map<std::string, SpaceRule> all;
  return all;
}

template <typename Map>
std::string names_of(const Map& map) {
  std::string names;
  for (const auto& [name, value] : map) names += (names.empty() ? "" : ", ") + name;
  return names.empty() ? "none" : names;
}

}  // namespace

const comm::CommunicatorPtr& EngineRanks::other(const std::string& name) const {
  const auto found = others.find(name);
  if (found == others.end())
    fail(ErrorKind::kKey, "the engine has no group of ranks '", name, "'; there are: ", names_of(others));
  return found->second;
}

SpaceRuleRegistration::SpaceRuleRegistration(SpaceRule rule) {
  const std::string name = rule.name;
  rules().emplace(name, std::move(rule));
}

const SpaceRule& find_space_rule(const std::string& name) {
  const auto found = rules().find(name.substr(0, name.find('.')));
  if (found == rules().end())
    fail(ErrorKind::kValue, "there is no rule '", name,
         "' for the ranks of a parameter; there are: ", names_of(rules()));
  return found->second;
}

}  // namespace ds::zero
