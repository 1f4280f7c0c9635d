// NVIDIA's GPUDirect Storage (libcufile.so.0), opened when it is asked for: files to and from device memory without the
// host's. Nothing of it is needed to build or to run the rest.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "io/descriptor.h"

namespace ds::io {

class CuFile {
 public:
  // Opens the library (`name`, or DS_CUFILE_LIBRARY, or libcufile.so.0) and its driver. Throws ErrorKind::kRuntime with
  // the reason where that fails.
  static std::shared_ptr<CuFile> open(const std::string& name = "");
  ~CuFile();
  CuFile(const CuFile&) = delete;
  CuFile& operator=(const CuFile&) = delete;

  // A file that cuFile knows. Opened with O_DIRECT where that works.
  class File {
   public:
    File(CuFile& library, const std::string& path, bool write);
    ~File();
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    // `bytes` of the file from `offset` on, to or from byte `at` of the device memory `base`. Any thread at any time.
    // Throws FileError.
    void read(void* base, uint64_t at, uint64_t bytes, uint64_t offset) const;
    void write(const void* base, uint64_t at, uint64_t bytes, uint64_t offset) const;

   private:
    CuFile& library_;
    std::string path_;
    Descriptor file_;
    void* handle_ = nullptr;
  };

  // Device memory that stays registered until remove(). Throws ErrorKind::kRuntime where cuFile refuses.
  void add(const void* memory, size_t bytes);
  void remove(const void* memory);

 private:
  struct Functions;
  CuFile();
  std::unique_ptr<Functions> functions_;
};

}  // namespace ds::io
