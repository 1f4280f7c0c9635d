// The operations that change what is on disk, each one counted for faults on order, each failure a FileError.
//
// One object serves a process: any thread may call it at any time. It outlives every file that was opened with it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "io/descriptor.h"

namespace ds::io {

class AioContexts;
class Faults;
class UringRings;

class Files {
 public:
  explicit Files(const std::string& fault_order = "");
  ~Files();

  Faults& faults() { return *faults_; }
  void inject(const std::string& fault_order);  // see Faults::arm
  AioContexts& aio_contexts() { return *aio_contexts_; }
  UringRings& uring_rings() { return *uring_rings_; }

  // Makes or empties `path` for writing. `direct`: past the page cache; on return false if the file system cannot.
  // `resizable`: whether it can set the size of a file (ftruncate); where it cannot (object stores), `direct` is false,
  // and what is written must be written in order and be the size of the file.
  Descriptor create(const std::string& path, bool* direct, bool* resizable);

  // Opens `path` for writing beside others who do, and makes it if it is not there. `direct` as above. `read`: for
  // reading as well.
  Descriptor open_part(const std::string& path, bool* direct, bool read = false);

  // Opens `path` for reading. `direct` as above.
  Descriptor open_read(const std::string& path, bool* direct);

  // Reserves blocks for the whole file, so that a full disk is an error now and not in the middle of it. On a file
  // system that cannot reserve, compares with what is free.
  void reserve(const Descriptor& file, const std::string& path, uint64_t bytes);

  // One pwrite, counted; returns what pwrite returns: it may write less, and -1 sets errno.
  ssize_t write_some(const Descriptor& file, const void* data, size_t bytes, uint64_t offset);

  // All of it. Where O_DIRECT turns out not to work on this file, turns it off.
  void write_all(const Descriptor& file, const std::string& path, const void* data, size_t bytes, uint64_t offset);

  // One pread, counted; returns what pread returns.
  ssize_t read_some(const Descriptor& file, void* data, size_t bytes, uint64_t offset);

  // At least `least` of the `bytes` at `offset`, of which the first `done` are there already; short reads and
  // interruptions go on. A read with O_DIRECT asks for whole blocks, and by `least` for the bytes that the file has.
  // Throws FileError, ENODATA where the file ends before.
  void read_all(const Descriptor& file, const std::string& path, void* data, size_t bytes, uint64_t offset,
                size_t least, size_t done = 0);

  void sync(const Descriptor& file, const std::string& path);
  void truncate(const Descriptor& file, const std::string& path, uint64_t bytes);

  // The entries of a folder, so that a rename or a new file in it survives a power cut.
  void sync_directory(const std::string& path);

  // `to` is replaced if it is there; never half. Neither syncs the folder: sync_directory does.
  void rename(const std::string& from, const std::string& to);

  // Both names keep existing and swap what they mean (files or folders), in one step. False, and nothing has happened,
  // where the file system does not know RENAME_EXCHANGE.
  bool exchange(const std::string& a, const std::string& b);

 private:
  int open_direct(const std::string& path, int flags);
  int resize(const Descriptor& file, uint64_t bytes);  // returns errno, or 0

  const std::unique_ptr<Faults> faults_;
  const std::unique_ptr<AioContexts> aio_contexts_;
  const std::unique_ptr<UringRings> uring_rings_;
};

}  // namespace ds::io
