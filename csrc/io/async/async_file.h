// Reads and writes of one file that go on while the caller does something else.
#pragma once
#include <memory>
#include <string>

#include "io/async/backend.h"
#include "io/files.h"

namespace ds::io {

// One thread at a time. Destruction waits for what is on its way, and drops its errors.
class AsyncFile {
 public:
  virtual ~AsyncFile() = default;

  // Starts writing `bytes` of `buffer` at `offset`; the buffer must not be touched until wait() returned it. With
  // O_DIRECT all three are multiples of kBlockBytes (the address of what the file asks for: BlockFile). At most `depth`
  // transfers at a time. Throws FileError.
  virtual void submit_write(char* buffer, size_t bytes, uint64_t offset) = 0;

  // The same for reading. The file has at least `least` of the bytes: with O_DIRECT the last read of a file asks for
  // whole blocks and gets less.
  virtual void submit_read(char* buffer, size_t bytes, uint64_t offset, size_t least) = 0;

  // Starts the transfers that AsyncOptions::batched holds back, in one system call. wait() does so, too.
  virtual void flush() {}

  // Waits until one more transfer is complete, short ones completed too, and returns its buffer; null when nothing is
  // on its way. Throws FileError if one failed, with its offset and size; ENODATA where the file ends too early.
  virtual char* wait() = 0;

  // As wait(), but null when nothing is complete yet.
  virtual char* poll() = 0;

  virtual const char* name() const = 0;  // "io_uring", "libaio" or "pwrite" (threads)
};

struct AsyncOptions {
  Backend backend = Backend::kAuto;
  bool batched = false;  // submit_... only prepares, see AsyncFile::flush
  int threads = 1;       // if threads transfer; 1: one transfer after the other, in order
};

// For a file opened with O_DIRECT (`direct`) what the options name, and of kAuto the first that works here; without
// O_DIRECT kAuto is threads: the others would block in submit or use threads of the kernel. `file`, `files` outlive it.
// Throws ErrorKind::kRuntime where the named one is refused.
std::unique_ptr<AsyncFile> open_async(Files& files, const Descriptor& file, const std::string& path, bool direct,
                                      int depth, const AsyncOptions& options = {});

// null where the kernel has no (more) rings, or contexts.
std::unique_ptr<AsyncFile> open_uring(Files& files, const Descriptor& file, const std::string& path, int depth,
                                      bool batched = false);
std::unique_ptr<AsyncFile> open_libaio(Files& files, const Descriptor& file, const std::string& path, int depth,
                                       bool batched = false);
std::unique_ptr<AsyncFile> open_threaded(Files& files, const Descriptor& file, const std::string& path,
                                         int threads = 1);

}  // namespace ds::io
