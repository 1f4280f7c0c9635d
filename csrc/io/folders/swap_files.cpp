#include "io/folders/swap_files.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <vector>

#include "io/file_error.h"
#include "io/folders/own_folder.h"

namespace ds::io {
namespace {

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Held while files are made and leftovers are removed: a file that is new and not locked yet is no leftover.
Descriptor locked_folder(const std::string& path) {
  Descriptor folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder.is_open()) fail_file(errno, "opening the folder", path);
  while (::flock(folder.get(), LOCK_EX) != 0 && errno == EINTR) {
  }
  return folder;
}

// "<name>.<six letters or digits>.tensor.swp", as SwapFile makes them.
bool is_temporary(const std::string& name) {
  const std::string end = SwapFile::kSuffix;
  constexpr size_t kLetters = 6;
  if (!ends_with(name, end) || name.size() < end.size() + kLetters + 1) return false;
  const std::string middle = name.substr(name.size() - end.size() - kLetters - 1, kLetters + 1);
  return middle[0] == '.' && std::all_of(middle.begin() + 1, middle.end(), [](unsigned char c) { return isalnum(c); });
}

int remove_unlocked(const Descriptor& folder, const std::string& path, uid_t owner) {
  std::vector<std::string> found;
  each_entry(folder, path, [&](const std::string& name) {
    if (is_temporary(name)) found.push_back(name);
  });
  int removed = 0;
  for (const std::string& name : found) {
    const Descriptor file = open_file_of(owner, folder, name);
    if (file.is_open() && ::flock(file.get(), LOCK_EX | LOCK_NB) == 0)
      removed += ::unlinkat(folder.get(), name.c_str(), 0) == 0;
  }
  return removed;
}

// The first part below the user's folder. Where another user has that, a folder with the number of this user in its
// name: several users may name one drive.
std::string first_folder(const std::string& base, const std::string& name) {
  try {
    own_folder(base, name, /*make=*/true);
    return name;
  } catch (const FileError& error) {
    if (error.code() != EPERM) throw;
  }
  const std::string mine = name + ".uid" + std::to_string(::geteuid());
  own_folder(base, mine, /*make=*/true);
  return mine;
}

// The user's own folder: made as `mkdir -p` makes it, where it is missing.
void make_with_parents(const std::string& key, const std::string& path) {
  if (path.empty()) throw FileError(ENOENT, path, key + " = \"\" names no folder. Name one on a local drive.");
  for (size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    const std::string part = path.substr(0, end);
    struct stat found;
    if (::stat(part.c_str(), &found) != 0 && ::mkdir(part.c_str(), 0777) != 0 && errno != EEXIST) {
      const int code = errno;
      throw FileError(code, part,
                      key + " = \"" + path + "\" is not there, and " + part + " cannot be made: " + strerror(code) +
                          ". Make the folder, on a local drive, or correct the path.");
    }
    if (end == std::string::npos) return;
  }
}

}  // namespace

std::string swap_folder(const std::string& key, const std::string& base, const std::string& below) {
  make_with_parents(key, base);
  struct stat found;
  if (::stat(base.c_str(), &found) != 0 || !S_ISDIR(found.st_mode)) {
    throw FileError(ENOTDIR, base, key + " = \"" + base + "\" is not a folder. Name a folder on a local drive.");
  }
  if (::access(base.c_str(), W_OK | X_OK) != 0) {
    const int code = errno;
    throw FileError(code, base,
                    key + " = \"" + base + "\" cannot be written to: " + strerror(code) + ". This is user " +
                        std::to_string(::geteuid()) + "; the folder belongs to user " + std::to_string(found.st_uid) +
                        ". Give it the right to write there, or name another folder.");
  }
  try {
    const size_t end = std::min(below.find('/'), below.size());
    const std::string made = first_folder(base, below.substr(0, end)) + below.substr(end);
    own_folder(base, made, /*make=*/true);
    return base + "/" + made;
  } catch (const FileError& error) {
    throw FileError(error.code(), error.path(), key + ": " + error.what());
  }
}

bool is_swap_name(const std::string& name) {
  const size_t last = name.find_last_not_of("0123456789");
  if (last == std::string::npos) return false;
  const bool numbered = last + 1 < name.size() && name[last] == '.';
  return ends_with(numbered ? name.substr(0, last) : name, SwapFile::kSuffix);
}

int remove_leftovers(const std::string& folder) { return remove_unlocked(locked_folder(folder), folder, ::geteuid()); }

SwapFile::SwapFile(const std::string& folder, const std::string& name) {
  std::string clean = name.substr(0, 100);
  for (char& c : clean) {
    if (c == '/' || c == '\0' || c == ' ') c = '_';
  }
  path_ = folder + "/" + clean + ".XXXXXX" + kSuffix;
  const Descriptor locked = locked_folder(folder);
  lock_ = Descriptor(::mkostemps(path_.data(), static_cast<int>(strlen(kSuffix)), O_CLOEXEC));
  if (!lock_.is_open()) fail_file(errno, "creating a file", path_);
  ::flock(lock_.get(), LOCK_EX | LOCK_NB);
  try {
    remove_unlocked(locked, folder, owner_of(lock_));
  } catch (...) {
    remove();
    throw;
  }
}

void SwapFile::remove() noexcept {
  if (owner_.here() && lock_.is_open()) ::unlink(path_.c_str());
  lock_.reset();
}

}  // namespace ds::io
