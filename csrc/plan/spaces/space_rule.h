// The ranks over which a parameter is spread, as axes of the job's grid: rules by name.
//
// A rule is a pure function. Adding a rule is adding a file with a SpaceRuleRegistration.
#pragma once
#include <string>
#include <vector>

#include "plan/process_grid.h"
#include "plan/purpose.h"

namespace ds::plan {

// Axes over which a sum of squares is added up: the ranks along them hold other elements.
struct NormAxes {
  Axes axes;
  bool first = true;  // false: an earlier one of these ranks holds the same elements, and counts them
};

struct SpaceAxes {
  Axes shard;     // each element has one owner among the ranks along these; {}: every rank owns all elements
  Axes replicas;  // the ranks along these hold the same shard
  // The sum of squares of what a rank owns is added up along these, one after the other: `shard`, then the axes of
  // other elements of the same layers (experts, slices), last "pp".
  std::vector<NormAxes> norm_over;
  Purpose purpose = Purpose::kReduce;  // of reductions over `shard` and `replicas`
  // The registered way in which gradients are reduced (zero/gradients/ways). "": the first that fits.
  std::string way{};
  // The registered source of gathered weights (zero/gathers/sources). "": the first that fits.
  std::string source{};
  // The ranks along `inner` have a second copy of what `shard` cuts, cut over them (hpZ), and the ranks along `outer`
  // have the same place in each of these groups. {}: no rank has a second copy.
  Axes inner{}, outer{};
};

struct SpaceQuery {
  const ProcessGrid& grid;
  std::string rule = "dense";  // ParamSpec::rule: only the rule itself reads the text behind a dot
  bool shards = false;         // the stage cuts optimizer states over the ranks that train a parameter
  std::string copied_along{};  // "tp" or "pp": an earlier rank along it trains a copy of the parameter; "": none does
};

struct SpaceRule {
  std::string name;
  SpaceAxes (*axes)(const SpaceQuery&);
  // The axis of a split for dense parameters: in a grid that has it, "dense" means this rule. "": never.
  std::string dense_where{};
};

struct SpaceRuleRegistration {
  explicit SpaceRuleRegistration(SpaceRule rule);
};

// The answer of the rule that the query names. Fails with the names that there are, and where it names unknown axes.
SpaceAxes space_axes(const SpaceQuery& query);

// The axes of the ranks that train the same dense parameters.
inline Axes same_weights() { return {"dp", "sp"}; }

// Appends the axes of other parts of the model, which end norm_over of each space: "tp", unless the ranks along it are
// among the space's own (`slices` false), then "pp".
void add_model_axes(SpaceAxes* space, const SpaceQuery& query, bool slices = true);
// Sets the axes of a second copy of the parameters where the grid has them.
void add_second_copy(SpaceAxes* space, const SpaceQuery& query);

}  // namespace ds::plan
