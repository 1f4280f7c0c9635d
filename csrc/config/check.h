// One value against one Field that is not a section.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "config/value.h"

namespace ds::config {

struct CheckResult {
  std::optional<Value> value;  // as it is kept: 5e8 as an integer, a choice as it is spelled in the Field
  std::string problem;         // "must be at least 0"; empty when value is set
  std::string suggestion;      // "Did you mean \"cpu\"?"
  std::string warning;         // the value was read in another way than written
  bool out_of_range = false;   // the type is right: Field::violation applies
};

// `lenient_texts`: a text that holds a number or a boolean stands for it where pydantic takes it, with a warning: "5",
// "5.0" for integers, "5e-1", too, for numbers, "true", "false", "1", "0" for booleans. `other_names`: what or_other()
// admits; nullptr admits every text.
CheckResult check(const Field& field, const Value& value, bool lenient_texts,
                  const std::vector<std::string>* other_names);

}  // namespace ds::config
