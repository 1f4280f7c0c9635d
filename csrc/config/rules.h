// Runs the cross-section rules of a schema on a resolved configuration, and what it tells about several keys together.
#pragma once
#include "config/resolver.h"

namespace ds::config {

void run_rules(Config& config, const Schema& schema, const Options& options);

// What a schema has to tell about a checked configuration: a title and lines for each of its consequences.
std::string consequences(const Config& config, const Schema& schema);

}  // namespace ds::config
