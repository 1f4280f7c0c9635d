// Files in memory that other processes of this host open by the process that has them and their number there (/proc).
#pragma once
#include <cstdint>

namespace ds::comm {

// A file without a name. `nonce`: a random number that belongs to it alone: process and file numbers of two containers
// may be the same, and a process that is told those of another would open its own file instead of the other's.
struct SharedFile {
  int64_t pid = -1, file = -1, nonce = 0;  // file < 0: there is none
};

// Of this process; the caller closes it.
SharedFile make_shared_file();
// The descriptor of the file that another process has told; -1 where it cannot be opened here, or is another one.
int open_shared_file(const SharedFile& theirs);

}  // namespace ds::comm
