// Runs the cross-section rules of a schema on a resolved configuration.
#pragma once
#include "config/resolver.h"

namespace ds::config {

void judge(Config& config, const Schema& schema, const Options& options);

}  // namespace ds::config
