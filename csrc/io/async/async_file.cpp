#include "io/async/async_file.h"

#include "base/error.h"
#include "io/async/uring_rings.h"

namespace ds::io {

Backend backend_named(const std::string& name) {
  if (name.empty() || name == "auto") return Backend::kAuto;
  if (name == "io_uring") return Backend::kUring;
  if (name == "libaio") return Backend::kLibaio;
  if (name == "threads") return Backend::kThreads;
  fail(ErrorKind::kValue, "there is no way '", name,
       "' to read and write files (DS_IO_BACKEND): it is io_uring, libaio, threads or auto");
}

std::unique_ptr<AsyncFile> open_async(Files& files, const Descriptor& file, const std::string& path, bool direct,
                                      int depth, const AsyncOptions& options) {
  const bool any = options.backend == Backend::kAuto;
  std::unique_ptr<AsyncFile> opened;
  if (options.backend == Backend::kUring || (any && direct))
    opened = open_uring(files, file, path, depth, options.batched);
  if (!opened && (options.backend == Backend::kLibaio || (any && direct)))
    opened = open_libaio(files, file, path, depth, options.batched);
  if (opened) return opened;
  if (!any && options.backend != Backend::kThreads) {
    const bool uring = options.backend == Backend::kUring;
    fail(ErrorKind::kRuntime, "this machine refuses ", uring ? "io_uring" : "libaio", " (",
         uring ? files.uring_rings().why_not() : "io_setup: see /proc/sys/fs/aio-max-nr",
         "), which DS_IO_BACKEND asks for: unset it, and what works here is chosen.");
  }
  return open_threaded(files, file, path, options.threads);
}

}  // namespace ds::io
