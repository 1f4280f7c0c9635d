#include "io/mapped_file.h"

#include <errno.h>
#include <sys/mman.h>

#include "io/file_error.h"

namespace ds::io {

MappedFile::MappedFile(Files& files, const Descriptor& file, const std::string& path, uint64_t bytes) : bytes_(bytes) {
  files.truncate(file, path, bytes);
  files.reserve(file, path, bytes);  // an error here, where a page that is not there would be a signal later
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file.get(), 0);
  if (memory == MAP_FAILED) fail_file(errno, "map", path, bytes);
  data_ = static_cast<char*>(memory);
}

MappedFile::~MappedFile() { ::munmap(data_, bytes_); }

}  // namespace ds::io
