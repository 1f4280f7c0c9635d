// Words of a configuration file that stand without quotes: constants and numbers.
#pragma once

#include <optional>
#include <string_view>

#include "config/value.h"

namespace ds::config {

// Without blanks, tabs and ends of lines around it.
std::string_view trimmed(std::string_view text);

// The constant or number that `word` is, in JSON or as Python writes it; nothing when it is a text.
std::optional<Value> constant_in(std::string_view word);

}  // namespace ds::config
