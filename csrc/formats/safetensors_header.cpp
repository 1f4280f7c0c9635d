#include "formats/safetensors_header.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <tuple>

#include "base/ranges.h"
#include "formats/format_error.h"
#include "formats/text_forms.h"

namespace ds::formats {
namespace {

constexpr uint64_t kLongestHeader = 100000000;  // the format's own bound

template <typename... What>
[[noreturn]] void bad_header(const CheckedFile& file, const What&... what) {
  damaged<DamagedSafetensors>(file.path(), ": ", what...);
}

// The depth of a header is three: an object of objects with lists. Deeper ones are refused before anything is made.
constexpr int kDeepest = 8;

// Keeps names in their order; refuses what the library would take silently: names that appear twice, and depth.
nlohmann::ordered_json parse(const CheckedFile& file, const std::string& text) {
  std::vector<std::vector<std::string>> keys;
  const auto on_item = [&](int depth, nlohmann::json::parse_event_t event, nlohmann::ordered_json& item) {
    using Event = nlohmann::json::parse_event_t;
    if (depth > kDeepest) bad_header(file, "its header cannot be read (it is nested ", depth, " deep)");
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) {
      std::vector<std::string>& names = keys.back();
      sort(names);
      if (std::adjacent_find(names.begin(), names.end()) != names.end()) {
        bad_header(file, "its header cannot be read (a name appears twice)");
      }
      keys.pop_back();
    }
    if (event == Event::key) keys.back().push_back(item.get<std::string>());
    return true;
  };
  try {
    return nlohmann::ordered_json::parse(text, on_item);
  } catch (const nlohmann::json::exception& error) {
    bad_header(file, "its header cannot be read (", error.what(), ")");
  }
}

uint64_t size_of(const CheckedFile& file, const std::string& name, const nlohmann::ordered_json& value) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() > (uint64_t{1} << 62)) {
    bad_header(file, "the tensor '", name, "': sizes that are not numbers");
  }
  return value.get<uint64_t>();
}

SafetensorsEntry entry_of(const CheckedFile& file, const std::string& name, const nlohmann::ordered_json& entry,
                          uint64_t start, const std::function<bool(const Element&)>& known,
                          const std::string& version) {
  const auto part = [&](const char* key) -> const nlohmann::ordered_json& {
    if (!entry.is_object() || !entry.contains(key)) bad_header(file, "the tensor '", name, "': it has no '", key, "'");
    return entry[key];
  };
  const nlohmann::ordered_json& dtype = part("dtype");
  SafetensorsEntry found;
  found.name = name;
  found.element = dtype.is_string() ? element_by_safetensors(dtype.get<std::string>()) : nullptr;
  if (found.element == nullptr || !known(*found.element)) {
    bad_header(file, "the tensor '", name, "': the dtype ",
               dtype.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace), " is unknown to torch ", version);
  }
  const nlohmann::ordered_json &shape = part("shape"), &offsets = part("data_offsets");
  if (!shape.is_array() || !offsets.is_array() || offsets.size() != 2) {
    bad_header(file, "the tensor '", name, "': a shape or offsets that are not lists");
  }
  const uint64_t begin = size_of(file, name, offsets[0]), end = size_of(file, name, offsets[1]);
  unsigned __int128 numel = 1;
  bool empty = false;
  for (const nlohmann::ordered_json& size : shape) {
    const uint64_t value = size_of(file, name, size);
    found.shape.push_back(static_cast<int64_t>(value));
    empty = empty || value == 0;
    numel = std::min<unsigned __int128>(numel * std::max<uint64_t>(value, 1), uint64_t{1} << 62);
  }
  if (empty) numel = 0;
  if (end < begin || end - begin != numel * found.element->bytes || end > file.bytes() - start) {
    bad_header(file, "the tensor '", name, "': ", static_cast<uint64_t>(numel), " elements of torch.",
               found.element->name, " in the bytes ", begin, " to ", end);
  }
  found.offset = start + begin;
  found.bytes = end - begin;
  return found;
}

}  // namespace

SafetensorsHeader read_safetensors_header(const CheckedFile& file, const std::function<bool(const Element&)>& known,
                                          const std::string& version) {
  const std::string head = file.text(0, std::min<uint64_t>(file.bytes(), 8));
  uint64_t length = 0;
  for (size_t i = head.size(); i-- > 0;) length = length << 8 | static_cast<uint8_t>(head[i]);
  if (file.bytes() < 8 || length > std::min(kLongestHeader, file.bytes() - 8)) {
    bad_header(file, "a header of ", length, " bytes in a file of ", file.bytes());
  }
  const std::string text = file.text(8, length);
  if (!is_utf8(text, false)) bad_header(file, "its header cannot be read (it is not UTF-8)");
  const nlohmann::ordered_json header = parse(file, text);
  if (!header.is_object()) bad_header(file, "its header is not an object");
  SafetensorsHeader found;
  std::vector<const SafetensorsEntry*> order;
  for (const auto& [name, value] : header.items()) {
    if (name != "__metadata__") {
      found.tensors.push_back(entry_of(file, name, value, 8 + length, known, version));
      continue;
    }
    if (!value.is_object()) bad_header(file, "its metadata are not an object");
    for (const auto& [key, text] : value.items())
      found.metadata.emplace_back(key, text.is_string() ? text.get<std::string>() : text.dump());
  }
  for (const SafetensorsEntry& entry : found.tensors) order.push_back(&entry);
  sort(order, [](const SafetensorsEntry* a, const SafetensorsEntry* b) {
    return std::tie(a->offset, a->bytes, a->name) < std::tie(b->offset, b->bytes, b->name);
  });
  for (size_t i = 1; i < order.size(); ++i) {
    if (order[i]->offset < order[i - 1]->offset + order[i - 1]->bytes) {
      bad_header(file, "the tensors '", order[i - 1]->name, "' and '", order[i]->name, "' overlap");
    }
  }
  return found;
}

}  // namespace ds::formats
