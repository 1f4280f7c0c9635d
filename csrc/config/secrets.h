// Keys whose values nobody shall read in a log, a report, a checkpoint or a bundle.
#pragma once
#include <string>

#include "config/field.h"
#include "config/value.h"

namespace ds::config {

// A copy of `value`, which belongs to the key `name`, with "***" for each secret: of keys whose Field is a secret, and
// of keys that no Field describes and that are called like one ("hf_token"). `field`: that of the key; null: there is
// none.
Value masked(const Value& value, const Field* field, const std::string& name = "");

}  // namespace ds::config
