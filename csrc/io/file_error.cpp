#include "io/file_error.h"

#include <errno.h>
#include <string.h>
#include <sys/statvfs.h>

#include <sstream>

#include "io/folders/paths.h"

namespace ds::io {
namespace {

std::string system_text(int code) {
  char text[256] = "";
  // The GNU version returns the text and may leave the array alone.
  return strerror_r(code, text, sizeof(text));
}

std::string fix_for(int code, const std::string& path, unsigned long long needed_bytes) {
  const std::string folder = parent_folder(path);
  std::ostringstream text;
  switch (code) {
    case ENOSPC:
    case EDQUOT: {
      if (needed_bytes) text << "The file needs " << needed_bytes << " bytes; ";
      struct statvfs disk;
      if (statvfs(folder.c_str(), &disk) == 0) {
        text << static_cast<unsigned long long>(disk.f_bavail) * disk.f_frsize << " bytes are free on the disk of "
             << folder << ". ";
      }
      text << (code == EDQUOT ? "Raise the quota" : "Free space there") << " or save to another disk.";
      break;
    }
    case ENOENT: text << "Make the folder " << folder << " first, or correct the path."; break;
    case EACCES:
    case EPERM: text << "Give this user the right to write in " << folder << "."; break;
    case EROFS: text << "The disk of " << folder << " is mounted read-only: remount it or save to another disk."; break;
    case EIO: text << "The disk reported an error: look into the kernel's log (dmesg) and save to another disk."; break;
    case EMFILE:
    case ENFILE: text << "Too many files are open: raise the limit (ulimit -n)."; break;
    case EISDIR: text << "The path is a folder: name a file."; break;
    case EFBIG: text << "The file is larger than the file system or `ulimit -f` allows."; break;
    default: text << "Check the path, the disk and its permissions.";
  }
  return text.str();
}

}  // namespace

void fail_file(int code, const char* operation, const std::string& path, unsigned long long needed_bytes) {
  std::ostringstream text;
  text << operation << " of " << path << " failed: " << system_text(code) << ". " << fix_for(code, path, needed_bytes);
  throw FileError(code, path, text.str());
}

void fail_transfer(int code, const char* operation, const std::string& path, uint64_t offset, uint64_t bytes) {
  const bool writes = code == ENOSPC || code == EDQUOT;
  std::ostringstream text;
  text << operation << " of " << path << " failed: " << system_text(code) << " (" << bytes << " bytes at byte "
       << offset << "). " << fix_for(code, path, writes ? offset + bytes : 0);
  throw FileError(code, path, text.str(), offset, bytes);
}

void fail_truncated(const std::string& path, uint64_t end, uint64_t offset, uint64_t bytes) {
  std::ostringstream text;
  text << "read of " << path << " failed: the file ends at byte " << end << ", and " << bytes
       << " bytes are wanted from byte " << offset << ". Something else has shortened it, or it was never complete.";
  throw FileError(ENODATA, path, text.str(), offset, bytes);
}

}  // namespace ds::io
