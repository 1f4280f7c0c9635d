// The rows of the table (pickle_names.h): plain types of Python; tensors and arrays.
#pragma once
#include <vector>

#include "formats/pickle_names.h"

namespace ds::formats {

std::vector<Rule> plain_rules();
std::vector<Rule> tensor_rules();

}  // namespace ds::formats
