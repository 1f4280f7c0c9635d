// The operations that change what is on disk, each one counted for faults on order, each failure a FileError.
//
// One object serves a process: any thread may call it at any time. It outlives every file that was opened with it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "io/descriptor.h"
#include "io/faults.h"

namespace ds::io {

class Files {
 public:
  explicit Files(const std::string& fault_order = "") : faults_(fault_order) {}

  Faults& faults() { return faults_; }

  // Makes or empties `path` for writing. `direct`: past the page cache; on return false if the file system cannot.
  Descriptor create(const std::string& path, bool* direct);

  // Reserves blocks for the whole file, so that a full disk is an error now and not in the middle of it. On a file
  // system that cannot reserve, compares with what is free.
  void reserve(const Descriptor& file, const std::string& path, uint64_t bytes);

  // One pwrite, counted; returns what pwrite returns: it may write less, and -1 sets errno.
  ssize_t write_some(const Descriptor& file, const void* data, size_t bytes, uint64_t offset);

  // All of it. Where O_DIRECT turns out not to work on this file, turns it off.
  void write_all(const Descriptor& file, const std::string& path, const void* data, size_t bytes, uint64_t offset);

  void sync(const Descriptor& file, const std::string& path);
  void truncate(const Descriptor& file, const std::string& path, uint64_t bytes);

  // The entries of a folder, so that a rename or a new file in it survives a power cut.
  void sync_directory(const std::string& path);

  // `to` is replaced if it is there; never half. Neither syncs the folder: sync_directory does.
  void rename(const std::string& from, const std::string& to);

  // Both names keep existing and swap what they mean (files or folders). Atomic where the file system knows
  // RENAME_EXCHANGE; elsewhere three renames through `<b>.exchange`: a crash between them leaves what `b` meant there.
  // Returns whether it was atomic.
  bool exchange(const std::string& a, const std::string& b);
  void exchange_by_renames(const std::string& a, const std::string& b);

 private:
  Faults faults_;
};

}  // namespace ds::io
