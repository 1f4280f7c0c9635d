// Paths: text arithmetic, and the one function that turns a recorded name into a path.
//
// A recorded name stands in a file (a manifest, an owner's mark, `latest`, a pickle) or came through a socket. Whoever
// wrote it may have meant harm. `path_below` is the only way from such a name to a path in this package; Python code
// that runs without torch has the same function in python/deepspeed/host/recorded_names.py, and tests compare the two.
#pragma once
#include <string>

namespace ds::io {

// The folder a path stands in: "." for a bare name, "/" for what stands in the root.
inline std::string parent_folder(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

enum class NameKind {
  kPath,   // parts with '/' between them; no link in it may leave the folder
  kEntry,  // one part, such as the name of a parameter; it may not be a link that leaves the folder
  kTag,    // as kPath, but links are followed: users link tags to folders on other drives
};

// "path", "entry", "tag". Throws ErrorKind::kValue for anything else.
NameKind name_kind(const std::string& text);

// `folder`/`name`. Throws ErrorKind::kValue, with `source` (the file or sender that says the name), the name and the
// reason: an absolute name; an empty one; a part that is empty, "." or ".."; a zero byte; a link that leads out of the
// folder or nowhere. The path need not be there. A link that is made afterwards is not seen: `remove_below` is for
// deletion.
std::string path_below(const std::string& folder, const std::string& name, const std::string& source,
                       NameKind kind = NameKind::kPath);

// Removes the regular file `name` below `folder`. No part of the name is followed if it is a link, also one that is
// made while this runs. False where there is no such file, or something else has its name: that stays. Throws as
// path_below for the text of the name, and FileError where the system refuses the removal.
bool remove_below(const std::string& folder, const std::string& name, const std::string& source);

}  // namespace ds::io
