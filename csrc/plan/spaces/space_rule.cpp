#include "plan/spaces/space_rule.h"

#include <map>
#include <utility>

#include "base/error.h"

namespace ds::plan {

namespace {

std::map<std::string, SpaceRule>& rules() {
  static std::map<std::string, SpaceRule> all;
  return all;
}

const SpaceRule& find_rule(const SpaceQuery& query) {
  const std::string name = query.rule.substr(0, query.rule.find('.'));
  if (name == "dense")
    for (const auto& [other, rule] : rules())
      if (!rule.dense_where.empty() && query.grid.has(rule.dense_where)) return rule;
  const auto found = rules().find(name);
  if (found != rules().end()) return found->second;
  std::string names;
  for (const auto& [known, rule] : rules()) names += (names.empty() ? "" : ", ") + known;
  fail(ErrorKind::kValue, "there is no rule '", query.rule, "' for the ranks of a parameter; the rules are: ", names);
}

}  // namespace

SpaceRuleRegistration::SpaceRuleRegistration(SpaceRule rule) {
  const std::string name = rule.name;
  rules().emplace(name, std::move(rule));
}

SpaceAxes space_axes(const SpaceQuery& query) {
  if (!query.copied_along.empty() && query.copied_along != "tp" && query.copied_along != "pp")
    fail(ErrorKind::kValue, "a parameter is copied along the axis '", query.copied_along, "'; 'tp' and 'pp' are known");
  return find_rule(query).axes(query);
}

void add_model_axes(SpaceAxes* space, const SpaceQuery& query, bool slices) {
  for (const char* axis : {"tp", "pp"})
    if ((slices || axis != std::string("tp")) && query.grid.has(axis) && query.grid.size({axis}) > 1)
      space->norm_over.push_back({{axis}, query.copied_along != axis});
}

void add_second_copy(SpaceAxes* space, const SpaceQuery& query) {
  if (!query.grid.has("hpz.inner")) return;
  space->inner = {"hpz.inner"};
  space->outer = {"hpz.groups"};
}

}  // namespace ds::plan
