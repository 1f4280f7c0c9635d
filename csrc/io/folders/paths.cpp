#include "io/folders/paths.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "base/error.h"
#include "io/descriptor.h"
#include "io/file_error.h"

namespace ds::io {
namespace {

// For messages: bytes that are no plain characters as \xNN.
std::string shown(const std::string& text) {
  std::string made;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      made += c;
    } else {
      char code[5];
      ::snprintf(code, sizeof code, "\\x%02x", byte);
      made += code;
    }
  }
  return made;
}

struct Recorded {
  const std::string& folder;
  const std::string& name;
  const std::string& source;

  [[noreturn]] void refuse(const std::string& why) const {
    fail(ErrorKind::kValue, source, " has the name '", shown(name), "', which ", why,
         ": it is damaged, or somebody wants files outside of ", folder,
         " to be read or changed. Nothing was done with that name");
  }
};

std::vector<std::string> parts_of(const Recorded& recorded, NameKind kind) {
  const std::string& name = recorded.name;
  if (name.empty()) recorded.refuse("is empty");
  if (name.find('\0') != std::string::npos) recorded.refuse("has a zero byte");
  if (name[0] == '/') recorded.refuse("is an absolute path");
  if (kind == NameKind::kEntry && name.find('/') != std::string::npos)
    recorded.refuse("has a '/' and is to be the name of one file or folder");
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('/', begin), name.size());
    parts.push_back(name.substr(begin, end - begin));
    if (parts.back().empty() || parts.back() == "." || parts.back() == "..")
      recorded.refuse("has a part '" + parts.back() + "'");
    begin = end + 1;
  }
  return parts;
}

// The path without links, or "" where there is nothing of that name.
std::string real_path(const std::string& path) {
  const std::unique_ptr<char, void (*)(void*)> found(::realpath(path.c_str(), nullptr), ::free);
  return found ? std::string(found.get()) : std::string();
}

bool is_in(const std::string& root, const std::string& path) {
  if (root == "/" || path == root) return true;
  return path.compare(0, root.size() + 1, root + "/") == 0;
}

void check_links(const Recorded& recorded, const std::vector<std::string>& parts) {
  const std::string root = real_path(recorded.folder);
  if (root.empty()) return;  // no folder, so no links in it
  std::string at = root;
  for (const std::string& part : parts) {
    at += (at == "/" ? "" : "/") + part;
    struct stat found;
    if (::lstat(at.c_str(), &found) != 0) return;  // a missing path has no links in it
    if (!S_ISLNK(found.st_mode)) continue;
    const std::string target = real_path(at);
    if (target.empty()) recorded.refuse("is or goes through a link that leads nowhere (" + shown(at) + ")");
    if (!is_in(root, target)) recorded.refuse("is or goes through a link that leaves the folder (" + shown(at) + ")");
    at = target;
  }
}

}  // namespace

NameKind name_kind(const std::string& text) {
  if (text == "path") return NameKind::kPath;
  if (text == "entry") return NameKind::kEntry;
  if (text == "tag") return NameKind::kTag;
  fail(ErrorKind::kValue, "the kind of a recorded name is path, entry or tag, not '", text, "'");
}

std::string path_below(const std::string& folder, const std::string& name, const std::string& source, NameKind kind) {
  const Recorded recorded{folder, name, source};
  const std::vector<std::string> parts = parts_of(recorded, kind);
  if (kind != NameKind::kTag) check_links(recorded, parts);
  return folder.empty() || folder.back() == '/' ? folder + name : folder + "/" + name;
}

bool remove_below(const std::string& folder, const std::string& name, const std::string& source) {
  const std::vector<std::string> parts = parts_of({folder, name, source}, NameKind::kPath);
  Descriptor at(::open(folder.empty() ? "." : folder.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  for (size_t i = 0; at.is_open() && i + 1 < parts.size(); ++i)
    at = Descriptor(::openat(at.get(), parts[i].c_str(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat found;
  if (!at.is_open() || ::fstatat(at.get(), parts.back().c_str(), &found, AT_SYMLINK_NOFOLLOW) != 0) return false;
  if (!S_ISREG(found.st_mode)) return false;
  if (::unlinkat(at.get(), parts.back().c_str(), 0) == 0) return true;
  if (errno != ENOENT) fail_file(errno, "removing", folder + "/" + name);
  return false;
}

}  // namespace ds::io
