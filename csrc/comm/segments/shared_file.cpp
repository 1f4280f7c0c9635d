#include "comm/segments/shared_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <string>

namespace ds::comm {

namespace {

// The nonce is in the name, which the kernel shows beside the descriptor: whoever opens the file asks before it reads.
std::string name_with(int64_t nonce) { return "deepspeed-" + std::to_string(nonce); }

}  // namespace

SharedFile make_shared_file() {
  SharedFile made;
  if (getrandom(&made.nonce, sizeof(made.nonce), 0) != sizeof(made.nonce)) return made;
  made.file = memfd_create(name_with(made.nonce).c_str(), MFD_CLOEXEC);
  made.pid = getpid();
  return made;
}

int open_shared_file(const SharedFile& theirs) {
  if (theirs.pid <= 0 || theirs.file < 0) return -1;
  const std::string path = "/proc/" + std::to_string(theirs.pid) + "/fd/" + std::to_string(theirs.file);
  const std::string expected = "/memfd:" + name_with(theirs.nonce);
  char target[128] = "";
  if (readlink(path.c_str(), target, sizeof(target) - 1) < 0) return -1;
  const std::string found = target;  // "/memfd:deepspeed-123 (deleted)"
  if (found.substr(0, found.find(' ')) != expected) return -1;
  return open(path.c_str(), O_RDWR | O_CLOEXEC);
}

}  // namespace ds::comm
