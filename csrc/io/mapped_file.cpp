#include "io/mapped_file.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "io/file_error.h"

namespace ds::io {
namespace {

bool has_all_pages(const Descriptor& file, uint64_t bytes) {
  struct stat found;
  return ::fstat(file.get(), &found) == 0 && static_cast<uint64_t>(found.st_blocks) * 512 >= bytes;
}

}  // namespace

MappedFile::MappedFile(Files& files, const Descriptor& file, const std::string& path, uint64_t bytes) : bytes_(bytes) {
  files.truncate(file, path, bytes);
  // An error here, where a page that is not there would be a signal later. Asking for pages that are there takes time.
  if (!has_all_pages(file, bytes)) files.reserve(file, path, bytes);
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file.get(), 0);
  if (memory == MAP_FAILED) fail_file(errno, "map", path, bytes);
  data_ = static_cast<char*>(memory);
}

MappedFile::~MappedFile() { ::munmap(data_, bytes_); }

}  // namespace ds::io
