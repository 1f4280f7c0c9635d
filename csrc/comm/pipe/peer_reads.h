// Memory of another process of this host, read where the kernel lets us (process_vm_readv): one copy, and
// the owner takes no part. Refused between users, in other PID namespaces, or by ptrace_scope: probe before.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ds::comm {

// False where the kernel refuses, or the process has gone.
bool read_peer(int64_t pid, uint64_t address, void* to, size_t bytes) noexcept;

}  // namespace ds::comm
