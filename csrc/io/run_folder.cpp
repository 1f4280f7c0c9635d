#include "io/run_folder.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <filesystem>
#include <utility>

#include "base/error.h"
#include "io/file_error.h"
#include "io/paths.h"

namespace ds::io {
namespace {

// "<pid>-<when it began>": a number of a process is given again, both together are not.
std::string this_process() { return std::to_string(::getpid()) + "-" + std::to_string(process_began(::getpid())); }

bool lock(const Descriptor& file, const std::string& path, int how) {
  int result;
  do {
    result = ::flock(file.get(), how);
  } while (result != 0 && errno == EINTR);
  if (result != 0 && errno != EWOULDBLOCK) fail_file(errno, "locking", path);
  return result == 0;
}

// The folder, alone for as long as the descriptor is open. Others may remove it while it is empty.
Descriptor alone_in(const std::string& path) {
  for (int attempt = 0;; ++attempt) {
    if (::mkdir(path.c_str(), 0777) != 0 && errno != EEXIST) fail_file(errno, "creating a folder", path);
    Descriptor made(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!made.is_open() && (errno != ENOENT || attempt > 100)) fail_file(errno, "opening the folder", path);
    if (!made.is_open()) continue;
    lock(made, path, LOCK_EX);
    struct stat held, named;
    if (::fstat(made.get(), &held) == 0 && ::stat(path.c_str(), &named) == 0 && held.st_ino == named.st_ino)
      return made;
  }
}

bool begins_with(const std::string& text, const std::string& start) {
  return text.compare(0, start.size(), start) == 0;
}

}  // namespace

RunFolder::RunFolder(const std::string& folder, const std::string& name, std::vector<std::string> owned)
    : folder_(folder), name_(name), owned_(std::move(owned)) {
  const Descriptor alone = alone_in(folder_);
  lock_path_ = folder_ + "/." + name_ + "." + this_process() + ".lock.XXXXXX";
  lock_ = Descriptor(::mkostemp(lock_path_.data(), O_CLOEXEC));
  if (!lock_.is_open()) fail_file(errno, "creating a file", lock_path_);
  try {
    lock(lock_, lock_path_, LOCK_EX);
    look_around();
  } catch (...) {
    ::unlink(lock_path_.c_str());
    throw;
  }
}

void RunFolder::look_around() const {
  const std::string start = "." + name_ + ".";
  bool shared = false;
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    const std::string file = entry.path().filename().string(), path = entry.path().string();
    if (!begins_with(file, start) || path == lock_path_) continue;
    const Descriptor other(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (!other.is_open()) continue;
    if (lock(other, path, LOCK_EX | LOCK_NB)) {
      ::unlink(path.c_str());
      continue;
    }
    shared = true;
    const std::string whose = file.substr(start.size(), file.find('.', start.size()) - start.size());
    if (whose == this_process()) continue;
    fail(ErrorKind::kRuntime, "the folder ", folder_, " is in use: process ", whose.substr(0, whose.find('-')),
         " of another run keeps its files of ", name_,
         " there and lives. Name another folder (nvme_path), or end that run.");
  }
  if (!shared) remove_left_files();
}

void RunFolder::remove_left_files() const {
  for (const std::string& sub : owned_) {
    std::error_code none;
    for (const auto& entry : std::filesystem::directory_iterator(folder_ + "/" + sub, none))
      if (entry.is_regular_file(none)) std::filesystem::remove(entry.path(), none);
  }
}

void RunFolder::close() noexcept {
  if (!owner_.here() || !lock_.is_open()) return;
  try {
    const Descriptor alone = alone_in(folder_);
    ::unlink(lock_path_.c_str());
    for (const std::string& sub : owned_)
      for (std::string path = folder_ + "/" + sub; path.size() > folder_.size(); path = parent_folder(path))
        ::rmdir(path.c_str());
    if (!owned_.empty()) ::rmdir(folder_.c_str());
    lock_.reset();
  } catch (const std::exception&) {  // the next run does it
  }
}

}  // namespace ds::io
