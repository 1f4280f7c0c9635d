#include "io/folders/own_folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <memory>

#include "io/file_error.h"
#include "io/folders/paths.h"

namespace ds::io {
namespace {

constexpr mode_t kOthersRights = 077;

int open_at(const Descriptor& folder, const std::string& name, int flags, mode_t mode = 0) {
  int number;
  do {
    number = ::openat(folder.get(), name.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, mode);
  } while (number < 0 && errno == EINTR);
  return number;
}

// A server may write down another owner than the user who asks (NFS with root_squash, some FUSE file systems). So a
// folder with a foreign owner is this user's when files that this process makes there get the same owner.
bool gives_its_owner(const Descriptor& folder, uid_t owner) {
  std::string name = ".owner.";
  name += std::to_string(::getpid()) + "." + std::to_string(reinterpret_cast<uintptr_t>(&name));
  const Descriptor made(open_at(folder, name, O_WRONLY | O_CREAT | O_EXCL, 0600));
  if (!made.is_open()) return false;
  struct stat facts;
  const bool same = ::fstat(made.get(), &facts) == 0 && facts.st_uid == owner;
  ::unlinkat(folder.get(), name.c_str(), 0);
  return same;
}

bool is_own(const Descriptor& folder, const struct stat& facts) {
  return facts.st_uid == ::geteuid() || gives_its_owner(folder, facts.st_uid);
}

[[noreturn]] void refuse(int code, const std::string& path, const std::string& why) {
  throw FileError(code, path, "the folder " + path + " cannot be used: " + why);
}

[[noreturn]] void refuse_owner(const std::string& path, uid_t owner) {
  refuse(EPERM, path,
         "it belongs to user " + std::to_string(owner) + ", and this process is user " + std::to_string(::geteuid()) +
             ". Name another folder.");
}

Descriptor own_part(const Descriptor& parent, const std::string& name, const std::string& path, bool make) {
  for (;;) {
    if (make && ::mkdirat(parent.get(), name.c_str(), 0700) != 0 && errno != EEXIST)
      fail_file(errno, "creating a folder", path);
    struct stat named, held;
    if (::fstatat(parent.get(), name.c_str(), &named, AT_SYMLINK_NOFOLLOW) != 0) {
      fail_file(errno, "opening the folder", path);
    }
    if (S_ISLNK(named.st_mode)) refuse(ELOOP, path, "it is a symbolic link. Remove the link, or name another folder.");
    if (!S_ISDIR(named.st_mode)) refuse(ENOTDIR, path, "it is not a folder. Remove it, or name another folder.");
    Descriptor opened(open_at(parent, name, O_RDONLY | O_DIRECTORY));
    if (!opened.is_open()) {
      if (errno == ELOOP || errno == ENOTDIR) continue;
      if (errno == EACCES && named.st_uid != ::geteuid()) refuse_owner(path, named.st_uid);
      fail_file(errno, "opening the folder", path);
    }
    if (::fstat(opened.get(), &held) != 0) fail_file(errno, "opening the folder", path);
    if (!is_own(opened, held)) refuse_owner(path, held.st_uid);
    if ((held.st_mode & kOthersRights) != 0) ::fchmod(opened.get(), held.st_mode & 07777 & ~kOthersRights);
    return opened;
  }
}

Descriptor own_parts(const std::string& base, const std::string& below, bool make) {
  Descriptor folder(::open(base.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder.is_open()) fail_file(errno, "opening the folder", base);
  for (size_t begin = 0; begin < below.size();) {
    const size_t end = std::min(below.find('/', begin), below.size());
    const std::string name = below.substr(begin, end - begin);
    if (name == "." || name == "..") refuse(EINVAL, base + "/" + below, "a part of its name is " + name + ".");
    if (!name.empty()) folder = own_part(folder, name, base + "/" + below.substr(0, end), make);
    begin = end + 1;
  }
  return folder;
}

}  // namespace

Descriptor own_folder(const std::string& base, const std::string& below, bool make) {
  const auto open = [&] { return own_parts(base, below, make); };
  return make ? despite_removal(open) : open();
}

Descriptor despite_removal(const std::function<Descriptor()>& make) {
  constexpr int kMost = 100;
  for (int attempt = 1;; ++attempt) {
    try {
      return make();
    } catch (const FileError& error) {
      if (error.code() != ENOENT || attempt == kMost) throw;
    }
  }
}

Descriptor own_folder(const std::string& path, bool make) {
  std::string whole = path;
  while (whole.size() > 1 && whole.back() == '/') whole.pop_back();
  return own_folder(parent_folder(whole), whole.substr(whole.find_last_of('/') + 1), make);
}

void each_entry(const Descriptor& folder, const std::string& path,
                const std::function<void(const std::string& name)>& each) {
  Descriptor again(::openat(folder.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));  // with a position of its own
  DIR* const opened = again.is_open() ? ::fdopendir(again.get()) : nullptr;
  if (opened == nullptr) fail_file(errno, "listing the folder", path);
  again.release();
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(opened, &::closedir);
  for (;;) {
    errno = 0;
    const dirent* entry = ::readdir(entries.get());
    if (entry == nullptr && errno != 0) fail_file(errno, "listing the folder", path);
    if (entry == nullptr) return;
    const std::string name = entry->d_name;
    if (name != "." && name != "..") each(name);
  }
}

Descriptor open_file_of(uid_t owner, const Descriptor& folder, const std::string& name) {
  Descriptor file(open_at(folder, name, O_RDWR | O_NONBLOCK | O_NOCTTY));
  struct stat facts;
  if (!file.is_open() || ::fstat(file.get(), &facts) != 0) return Descriptor();
  if (S_ISREG(facts.st_mode) && facts.st_uid == owner) return file;
  file.reset();
  errno = EPERM;
  return file;
}

uid_t owner_of(const Descriptor& file) {
  struct stat facts;
  return ::fstat(file.get(), &facts) == 0 ? facts.st_uid : ::geteuid();
}

}  // namespace ds::io
