// Writes of one file that go on while the caller does something else.
#pragma once
#include <memory>
#include <string>

#include "io/files.h"

namespace ds::io {

// One thread at a time. Destruction waits for what is on its way, and drops its errors.
class AsyncFile {
 public:
  virtual ~AsyncFile() = default;

  // Starts writing `bytes` of `buffer` at `offset`; the buffer must not be touched until wait() returned it. With
  // O_DIRECT all three are multiples of kBlockBytes. At most `depth` writes at a time. Throws FileError.
  virtual void submit(char* buffer, size_t bytes, uint64_t offset) = 0;

  // Waits until one more write is complete, short writes completed too, and returns its buffer; null when nothing is
  // on its way. Throws FileError if a write failed.
  virtual char* wait() = 0;

  virtual const char* name() const = 0;  // "libaio" or "pwrite"
};

// libaio if `direct` and the kernel gives a context for it, else pwrite on a thread. `file`, `files` outlive it.
std::unique_ptr<AsyncFile> open_async(Files& files, const Descriptor& file, const std::string& path, bool direct,
                                      int depth);

// null where the kernel has no (more) contexts.
std::unique_ptr<AsyncFile> open_libaio(Files& files, const Descriptor& file, const std::string& path, int depth);
std::unique_ptr<AsyncFile> open_threaded(Files& files, const Descriptor& file, const std::string& path);

}  // namespace ds::io
