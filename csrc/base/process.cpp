#include "base/process.h"

#include <errno.h>
#include <malloc.h>
#include <signal.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

namespace ds {

namespace {

constexpr unsigned long kExiting = 0x4;  // PF_EXITING of the kernel, in the field `flags` of proc(5)

struct Stat {
  char state = '?';
  unsigned long flags = 0;
  uint64_t began = 0;
};

Stat stat_of(int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text);
  Stat made;
  const size_t name_end = text.rfind(')');  // the name may hold anything
  if (name_end == std::string::npos) return made;
  std::istringstream fields(text.substr(name_end + 1));
  std::string skipped;
  fields >> made.state;
  for (int field = 4; field <= 8; ++field) fields >> skipped;
  fields >> made.flags;
  for (int field = 10; field <= 21; ++field) fields >> skipped;
  fields >> made.began;
  return made;
}

}  // namespace

char process_state(int64_t pid) { return stat_of(pid).state; }

uint64_t process_began(int64_t pid) { return stat_of(pid).began; }

void keep_freed_memory() {
  for (const char* name : {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"})
    if (std::getenv(name)) return;
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the largest one that glibc takes
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
}

OwningProcess::OwningProcess() : pid_(getpid()) {}

bool OwningProcess::here() const { return pid_ == getpid(); }

bool process_ended(int64_t pid) {
  if (kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH) return true;
  const Stat found = stat_of(pid);
  return found.state == 'Z' || found.state == 'X' || (found.flags & kExiting) != 0;
}

}  // namespace ds
