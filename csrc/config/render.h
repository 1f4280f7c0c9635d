// Renders the schema and a resolved configuration for people and for editors.
#pragma once
#include <string>

#include "config/resolver.h"

namespace ds::config {

// Every key with its value and where that came from, then conflicts and warnings with their lines.
std::string explain(const Config& config, const Schema& schema);
// One line per key that does not have its default: "zero_optimization.stage = 2 (line 12)". "" when all have.
std::string non_default(const Config& config, const Schema& schema);
// docs/config.md, for all three configurations.
std::string docs();
// A JSON Schema (draft 2020-12) that editors use; "x-ds-..." says what JSON Schema has no word for.
std::string json_schema(const Schema& schema);

// The feature this key waits for, given those of the sections around it; "" when it is there.
std::string pending_feature(const Field& field, const std::string& outer);
// "; ...": that this key has no effect and why; "" where it has one. `unknown`: a key that `field`, its section, keeps
// without knowing it.
std::string no_effect_of(const Field& field, bool unknown = false);
// "at least 0", "one of ...", for tables.
std::string limits_of(const Field& field);

}  // namespace ds::config
