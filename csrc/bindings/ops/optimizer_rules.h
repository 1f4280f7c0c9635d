// Hyperparameters from Python, by name.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "optim/rule.h"

namespace ds::bindings {

// In the order of rule.hyper, fallbacks where `given` has nothing; fails for a name that the rule has not.
std::vector<double> hyper_values(const optim::Rule& rule, const std::map<std::string, double>& given);

}  // namespace ds::bindings
