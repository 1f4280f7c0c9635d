// Parameters of the built-in optimizers, by type. Only what is written here may stand in optimizer.params of these.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "config/field.h"

namespace ds::config {

std::map<std::string, std::vector<Field>> optimizer_params();

}  // namespace ds::config
