// The ZeRO section, which the inference configuration shares.
#pragma once
#include <string>

#include "config/field.h"

namespace ds::config {

Field zero_section(std::string name, std::string doc);

}  // namespace ds::config
