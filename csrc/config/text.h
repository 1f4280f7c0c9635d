// Texts that several files of this room need in the same way.
#pragma once
#include <cctype>
#include <string>

namespace ds::config {

// "zero_optimization", "stage" -> "zero_optimization.stage"; at the top level the key alone.
inline std::string join_path(const std::string& path, const std::string& key) {
  return path.empty() ? key : path + "." + key;
}

// ASCII letters only: keys and choices are ASCII.
inline std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

}  // namespace ds::config
