// Files in memory that other processes of this host open through /proc, by process and file descriptor.
#pragma once
#include <cstdint>

namespace ds::comm {

// A file without a name. `nonce`: a random number of this file: process and file numbers of two containers may be the
// same, and a process with the numbers of another container would open its own file instead of the other's.
struct SharedFile {
  int64_t pid = -1, file = -1, nonce = 0;  // file < 0: no file
};

// Makes a file of this process; the caller closes it.
SharedFile make_shared_file();
// A descriptor of the file of another process; -1 where it cannot be opened here, or has another nonce.
int open_shared_file(const SharedFile& theirs);

}  // namespace ds::comm
