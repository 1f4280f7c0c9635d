// Element types of stored tensors, by torch's names: sizes are all that reading needs.
#pragma once
#include <cstdint>
#include <string_view>

namespace ds::formats {

struct Element {
  std::string_view name;  // "bfloat16", as in torch.bfloat16
  uint8_t bytes;
  bool complex;  // two numbers, each with its own byte order
};

// nullptr for a name that is no dtype. Also torch's other names: "half", "long", "cdouble".
const Element* element_by_dtype(std::string_view name);

// "FloatStorage" and so on; nullptr for anything else. "UntypedStorage" has elements of one byte.
const Element* element_by_storage(std::string_view name);

// "F32" and so on, of a safetensors file.
const Element* element_by_safetensors(std::string_view name);

// The other way round; empty for a dtype that the format has no name for.
std::string_view safetensors_code(std::string_view dtype);

}  // namespace ds::formats
