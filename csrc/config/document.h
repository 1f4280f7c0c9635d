// A configuration as it was written: values, and the line each key stands on.
#pragma once
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "config/issue.h"
#include "config/value.h"

namespace ds::config {

inline constexpr int kMaxDepth = 64;  // of nested objects and lists; real files have 6

struct Document {
  Value root = Value::object();
  std::string source;                          // file name, or "config" for a dict
  std::unordered_map<std::string, int> lines;  // dotted path -> line, from 1; empty for a dict
  std::vector<Issue> issues;                   // duplicate keys, keys with stray blanks, texts that took a comma in
};

// Reads JSON and HJSON: comments (// /* */ #), trailing commas, no comma at the end of a line, keys without quotes,
// texts without quotes (to the end of their line, commas and brackets included), texts of several lines between ''', no
// braces around the whole; also NaN, Infinity, True, None. A text that cannot be read at all throws Error(kConfig) with
// line and column; what can be told apart later goes to `issues`. Never recurses deeper than kMaxDepth; any bytes are
// safe.
Document read_text(std::string_view text, const std::string& source);

// Takes keys as they are in a Python dict: strips stray blanks as read_text does.
Document from_value(Value root, const std::string& source);

}  // namespace ds::config
