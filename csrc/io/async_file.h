// Reads and writes of one file that go on while the caller does something else.
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
  // O_DIRECT all three are multiples of kBlockBytes. At most `depth` transfers at a time. Throws FileError.
  virtual void submit_write(char* buffer, size_t bytes, uint64_t offset) = 0;

  // The same for reading. The file has at least `least` of the bytes: with O_DIRECT the last read of a file asks for
  // whole blocks and gets less.
  virtual void submit_read(char* buffer, size_t bytes, uint64_t offset, size_t least) = 0;

  // Waits until one more transfer is complete, short ones completed too, and returns its buffer; null when nothing is
  // on its way. Throws FileError if one failed, with its place and size; ENODATA where the file ends too early.
  virtual char* wait() = 0;

  virtual const char* name() const = 0;  // "libaio" or "pwrite" (a thread)
};

// libaio if `direct` and the kernel gives a context for it, else pread and pwrite on a thread. `depth` is at most
// AioContexts::kDepth. `file`, `files` outlive it.
std::unique_ptr<AsyncFile> open_async(Files& files, const Descriptor& file, const std::string& path, bool direct,
                                      int depth);

// null where the kernel has no (more) contexts.
std::unique_ptr<AsyncFile> open_libaio(Files& files, const Descriptor& file, const std::string& path, int depth);
std::unique_ptr<AsyncFile> open_threaded(Files& files, const Descriptor& file, const std::string& path);

}  // namespace ds::io
