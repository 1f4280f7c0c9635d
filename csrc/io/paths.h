// Text arithmetic on paths; nothing is looked up.
#pragma once
#include <string>

namespace ds::io {

// The folder a path stands in: "." for a bare name, "/" for what stands in the root.
inline std::string parent_folder(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace ds::io
