#include "comm/pipe/peer_reads.h"

#include <sys/uio.h>

#include <cerrno>

namespace ds::comm {

namespace {

template <typename Call>
bool in_full(size_t bytes, const Call& call) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t moved = call(done);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return false;
    done += static_cast<size_t>(moved);
  }
  return true;
}

iovec span(uint64_t address, size_t bytes) {
  return {reinterpret_cast<void*>(address), bytes};  // NOLINT(performance-no-int-to-ptr): of another process
}

}  // namespace

bool read_peer(int64_t pid, uint64_t address, void* to, size_t bytes) noexcept {
  return in_full(bytes, [&](size_t done) {
    const iovec here{static_cast<char*>(to) + done, bytes - done}, there = span(address + done, bytes - done);
    return process_vm_readv(static_cast<pid_t>(pid), &here, 1, &there, 1, 0);
  });
}

}  // namespace ds::comm
