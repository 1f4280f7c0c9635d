// The interface to the kernel for asynchronous transfers.
#pragma once
#include <string>

namespace ds::io {

// kAuto: the first that works here of io_uring, libaio and threads. Containers often refuse io_uring (seccomp).
enum class Backend { kAuto, kUring, kLibaio, kThreads };

// "io_uring", "libaio", "threads"; "" and "auto": kAuto. Throws ErrorKind::kValue for anything else.
Backend backend_named(const std::string& name);

}  // namespace ds::io
