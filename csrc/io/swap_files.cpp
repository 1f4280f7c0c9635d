#include "io/swap_files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <memory>

#include "io/file_error.h"

namespace ds::io {
namespace {

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Held while files are made and leftovers are removed: a file that is new and not locked yet is no leftover.
class FolderLock {
 public:
  explicit FolderLock(const std::string& folder) : file_(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
    while (file_.is_open() && ::flock(file_.get(), LOCK_EX) != 0 && errno == EINTR) {
    }
  }

 private:
  Descriptor file_;
};

int remove_unlocked(const std::string& folder) {
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(::opendir(folder.c_str()), &::closedir);
  int removed = 0;
  while (const dirent* entry = entries ? ::readdir(entries.get()) : nullptr) {
    const std::string path = folder + "/" + entry->d_name;
    if (!ends_with(path, SwapFile::kSuffix)) continue;
    const Descriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (!file.is_open() || ::flock(file.get(), LOCK_EX | LOCK_NB) != 0) continue;
    removed += ::unlink(path.c_str()) == 0;
  }
  return removed;
}

void make_folder(const std::string& path, const std::string& key) {
  if (::mkdir(path.c_str(), 0777) == 0 || errno == EEXIST) return;
  const int code = errno;
  throw FileError(code, path,
                  key + ": the folder " + path + " cannot be made: " + strerror(code) +
                      ". Name a folder on a local drive in which this user may write.");
}

}  // namespace

std::string swap_folder(const std::string& key, const std::string& base, const std::string& below) {
  struct stat found;
  const bool there = ::stat(base.c_str(), &found) == 0;
  if (!there || !S_ISDIR(found.st_mode)) {
    throw FileError(there ? ENOTDIR : ENOENT, base,
                    key + " = \"" + base + "\" " + (there ? "is no folder" : "is not there") +
                        ". Make the folder, on a local drive, or correct the path.");
  }
  if (::access(base.c_str(), W_OK | X_OK) != 0) {
    const int code = errno;
    throw FileError(code, base,
                    key + " = \"" + base + "\" cannot be written to: " + strerror(code) + ". This is user " +
                        std::to_string(::geteuid()) + "; the folder belongs to user " + std::to_string(found.st_uid) +
                        ". Give it the right to write there, or name another folder.");
  }
  std::string path = base;
  for (size_t begin = 0; begin < below.size();) {
    const size_t end = std::min(below.find('/', begin), below.size());
    path += "/" + below.substr(begin, end - begin);
    make_folder(path, key);
    begin = end + 1;
  }
  return path;
}

int remove_leftovers(const std::string& folder) {
  const FolderLock lock(folder);
  return remove_unlocked(folder);
}

SwapFile::SwapFile(const std::string& folder, const std::string& name) {
  std::string clean = name.substr(0, 100);
  for (char& c : clean) {
    if (c == '/' || c == '\0' || c == ' ') c = '_';
  }
  path_ = folder + "/" + clean + ".XXXXXX" + kSuffix;
  const FolderLock lock(folder);
  remove_unlocked(folder);
  lock_ = Descriptor(::mkostemps(path_.data(), static_cast<int>(strlen(kSuffix)), O_CLOEXEC));
  if (!lock_.is_open()) fail_file(errno, "creating a file", path_);
  ::flock(lock_.get(), LOCK_EX | LOCK_NB);
}

void SwapFile::remove() noexcept {
  if (owner_.here() && lock_.is_open()) ::unlink(path_.c_str());
  lock_.reset();
}

}  // namespace ds::io
