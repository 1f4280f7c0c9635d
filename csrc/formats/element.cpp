#include "formats/element.h"

#include <iterator>

namespace ds::formats {
namespace {

struct Row {
  Element element;
  std::string_view other, storage, safetensors;
};

const Row kRows[] = {
    {{"float64", 8, false}, "double", "DoubleStorage", "F64"},
    {{"float32", 4, false}, "float", "FloatStorage", "F32"},
    {{"float16", 2, false}, "half", "HalfStorage", "F16"},
    {{"bfloat16", 2, false}, "", "BFloat16Storage", "BF16"},
    {{"int64", 8, false}, "long", "LongStorage", "I64"},
    {{"int32", 4, false}, "int", "IntStorage", "I32"},
    {{"int16", 2, false}, "short", "ShortStorage", "I16"},
    {{"int8", 1, false}, "", "CharStorage", "I8"},
    {{"uint8", 1, false}, "", "ByteStorage", "U8"},
    {{"bool", 1, false}, "", "BoolStorage", "BOOL"},
    {{"complex128", 16, true}, "cdouble", "ComplexDoubleStorage", ""},
    {{"complex64", 8, true}, "cfloat", "ComplexFloatStorage", "C64"},
    {{"complex32", 4, true}, "chalf", "", ""},
    {{"uint16", 2, false}, "", "", "U16"},
    {{"uint32", 4, false}, "", "", "U32"},
    {{"uint64", 8, false}, "", "", "U64"},
    {{"float8_e4m3fn", 1, false}, "", "", "F8_E4M3"},
    {{"float8_e5m2", 1, false}, "", "", "F8_E5M2"},
    {{"float8_e4m3fnuz", 1, false}, "", "", ""},
    {{"float8_e5m2fnuz", 1, false}, "", "", ""},
    {{"float8_e8m0fnu", 1, false}, "", "", ""},
};

}  // namespace

const Element* element_by_dtype(std::string_view name) {
  for (const Row& row : kRows) {
    if (row.element.name == name || (!row.other.empty() && row.other == name)) return &row.element;
  }
  return nullptr;
}

const Element* element_by_storage(std::string_view name) {
  if (name == "UntypedStorage" || name == "_UntypedStorage") return element_by_dtype("uint8");
  for (const Row& row : kRows) {
    if (!row.storage.empty() && row.storage == name) return &row.element;
  }
  return nullptr;
}

const Element* element_by_safetensors(std::string_view name) {
  for (const Row& row : kRows) {
    if (!row.safetensors.empty() && row.safetensors == name) return &row.element;
  }
  return nullptr;
}

std::string_view safetensors_code(std::string_view dtype) {
  for (const Row& row : kRows) {
    if (row.element.name == dtype) return row.safetensors;
  }
  return {};
}

}  // namespace ds::formats
