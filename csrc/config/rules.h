// Runs the cross-section rules of a schema on a resolved configuration, and what it tells about several keys together.
#pragma once
#include "config/resolver.h"

namespace ds::config {

void run_rules(Config& config, const Schema& schema, const Options& options);

// Consequences of a checked configuration, which a schema explains: a title and lines for each of them.
std::string consequences(const Config& config, const Schema& schema);

}  // namespace ds::config
