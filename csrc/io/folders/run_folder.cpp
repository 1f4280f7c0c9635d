#include "io/folders/run_folder.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <utility>

#include "base/error.h"
#include "io/file_error.h"
#include "io/folders/own_folder.h"
#include "io/folders/swap_files.h"

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
  for (;;) {
    Descriptor made = own_folder(path, /*make=*/true);
    lock(made, path, LOCK_EX);
    struct stat held, named;
    if (::fstat(made.get(), &held) == 0 && ::lstat(path.c_str(), &named) == 0 && held.st_ino == named.st_ino &&
        held.st_dev == named.st_dev)
      return made;
  }
}

bool begins_with(const std::string& text, const std::string& start) {
  return text.compare(0, start.size(), start) == 0;
}

// `below` in a folder and its parents there, as far as they are empty folders of this user.
void remove_empty(const Descriptor& folder, std::string below) {
  const std::string base = "/proc/self/fd/" + std::to_string(folder.get());
  while (!below.empty()) {
    const size_t slash = below.rfind('/');
    const std::string parent = slash == std::string::npos ? "" : below.substr(0, slash);
    try {
      const Descriptor above = own_folder(base, parent, /*make=*/false);
      ::unlinkat(above.get(), below.substr(slash == std::string::npos ? 0 : slash + 1).c_str(), AT_REMOVEDIR);
    } catch (const FileError&) {  // not there, or another's
    }
    below = parent;
  }
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
    look_around(alone);
  } catch (...) {
    ::unlink(lock_path_.c_str());
    throw;
  }
}

// Whether a run that has left this lock file lives; a file without a holder is removed. What cannot be opened may be
// held: nothing says that it is not.
bool RunFolder::is_held(const Descriptor& folder, const std::string& file) const {
  const Descriptor other = open_file_of(owner_of(lock_), folder, file);
  if (!other.is_open()) {
    if (errno == ENOENT) return false;
    const int code = errno;
    fail(ErrorKind::kRuntime, "the folder ", folder_, " counts as in use: its lock file ", file, " cannot be opened (",
         strerror(code), "), so nobody can tell whether the run that made it lives. ",
         code == EMFILE || code == ENFILE ? "Raise the limit of open files (ulimit -n)."
                                          : "Name another folder (nvme_path), or remove that file.");
  }
  if (!lock(other, folder_ + "/" + file, LOCK_EX | LOCK_NB)) return true;
  ::unlinkat(folder.get(), file.c_str(), 0);
  return false;
}

void RunFolder::look_around(const Descriptor& folder) const {
  const std::string start = "." + name_ + ".";
  std::vector<std::string> found;
  each_entry(folder, folder_, [&](const std::string& file) {
    if (begins_with(file, start) && folder_ + "/" + file != lock_path_) found.push_back(file);
  });
  bool shared = false;
  for (const std::string& file : found) {
    if (!is_held(folder, file)) continue;
    shared = true;
    const std::string whose = file.substr(start.size(), file.find('.', start.size()) - start.size());
    if (whose == this_process()) continue;
    fail(ErrorKind::kRuntime, "the folder ", folder_, " is in use: process ", whose.substr(0, whose.find('-')),
         " of another run keeps its files of ", name_,
         " there and lives. Name another folder (nvme_path), or end that run.");
  }
  if (!shared) remove_left_files(folder);
}

void RunFolder::remove_left_files(const Descriptor& folder) const {
  for (const std::string& sub : owned_) {
    const std::string path = folder_ + "/" + sub;
    try {
      const Descriptor left = own_folder("/proc/self/fd/" + std::to_string(folder.get()), sub, /*make=*/false);
      each_entry(left, path, [&](const std::string& file) {
        if (is_swap_name(file) && open_file_of(owner_of(lock_), left, file).is_open())
          ::unlinkat(left.get(), file.c_str(), 0);
      });
    } catch (const FileError& error) {  // a folder that is not there, or no folder of this user
      if (error.code() != ENOENT && error.code() != ELOOP && error.code() != ENOTDIR && error.code() != EPERM) throw;
    }
  }
}

void RunFolder::close() noexcept {
  if (!owner_.here() || !lock_.is_open()) return;
  try {
    const Descriptor alone = alone_in(folder_);
    ::unlink(lock_path_.c_str());
    for (const std::string& sub : owned_) remove_empty(alone, sub);
    if (!owned_.empty()) ::rmdir(folder_.c_str());
    lock_.reset();
  } catch (const std::exception&) {  // the next run does it
  }
}

}  // namespace ds::io
