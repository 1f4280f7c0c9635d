// The header of a safetensors file (huggingface.co/docs/safetensors): an 8-byte length, JSON, the bytes of the tensors.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "formats/checked_file.h"
#include "formats/element.h"

namespace ds::formats {

struct SafetensorsEntry {
  std::string name;
  const Element* element = nullptr;
  std::vector<int64_t> shape;
  uint64_t offset = 0;  // of the file
  uint64_t bytes = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> tensors;  // in the order of the file's header
  std::vector<std::pair<std::string, std::string>> metadata;
};

// DamagedSafetensors for a header that contradicts itself or the file; io::FileError. `known` says which dtypes the
// caller can make; `version` is whose they are, for the message.
SafetensorsHeader read_safetensors_header(const CheckedFile& file, const std::function<bool(const Element&)>& known,
                                          const std::string& version);

}  // namespace ds::formats
