#include "io/async/cufile.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "io/file_error.h"

namespace ds::io {
// The parts of cuFile's interface that are used here, as its documentation has them.
struct CuFileError {
  int code;    // 0, or 5001 and more
  int driver;  // of CUDA
};
struct CuFileDescription {
  int type;  // 1: a file descriptor of Linux
  union {
    int number;
    void* handle;
  } file;
  const void* operations;
};
namespace {

constexpr int kLinuxDescriptor = 1;

std::string text_of(const CuFileError& error) {
  return "cuFile error " + std::to_string(error.code) +
         (error.driver ? ", CUDA error " + std::to_string(error.driver) : "");
}

}  // namespace

struct CuFile::Functions {
  void* library = nullptr;
  bool opened = false;
  CuFileError (*driver_open)() = nullptr;
  CuFileError (*driver_close)() = nullptr;
  CuFileError (*handle_register)(void**, CuFileDescription*) = nullptr;
  void (*handle_deregister)(void*) = nullptr;
  CuFileError (*buffer_register)(const void*, size_t, int) = nullptr;
  CuFileError (*buffer_deregister)(const void*) = nullptr;
  ssize_t (*read)(void*, void*, size_t, off_t, off_t) = nullptr;
  ssize_t (*write)(void*, const void*, size_t, off_t, off_t) = nullptr;

  ~Functions() {
    if (opened) driver_close();
    if (library != nullptr) ::dlclose(library);
  }
  template <typename Function>
  void find(Function& function, const char* name) {
    function = reinterpret_cast<Function>(::dlsym(library, name));
    if (function == nullptr) {
      fail(ErrorKind::kRuntime, "GPUDirect storage cannot be used: its library has no function ", name,
           " (it is of another version). Use aio_handle, which goes through the host.");
    }
  }
};

CuFile::CuFile() : functions_(std::make_unique<Functions>()) {}
CuFile::~CuFile() = default;

std::shared_ptr<CuFile> CuFile::open(const std::string& name) {
  const char* named = ::getenv("DS_CUFILE_LIBRARY");
  const std::string path = !name.empty() ? name : named != nullptr && *named ? named : "libcufile.so.0";
  std::shared_ptr<CuFile> made(new CuFile());
  Functions& functions = *made->functions_;
  functions.library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (functions.library == nullptr) {
    fail(ErrorKind::kRuntime, "GPUDirect storage cannot be used: ", ::dlerror(),
         ". Install NVIDIA's GDS (package libcufile), or use aio_handle, which goes through the host.");
  }
  functions.find(functions.driver_open, "cuFileDriverOpen");
  functions.find(functions.driver_close, "cuFileDriverClose");
  functions.find(functions.handle_register, "cuFileHandleRegister");
  functions.find(functions.handle_deregister, "cuFileHandleDeregister");
  functions.find(functions.buffer_register, "cuFileBufRegister");
  functions.find(functions.buffer_deregister, "cuFileBufDeregister");
  functions.find(functions.read, "cuFileRead");
  functions.find(functions.write, "cuFileWrite");
  const CuFileError error = functions.driver_open();
  if (error.code != 0) {
    fail(ErrorKind::kRuntime, "GPUDirect storage cannot be used: cuFileDriverOpen gave ", text_of(error),
         ". See `gdscheck -p`; aio_handle goes through the host instead.");
  }
  functions.opened = true;
  return made;
}

void CuFile::add(const void* memory, size_t bytes) {
  const CuFileError error = functions_->buffer_register(memory, bytes, 0);
  if (error.code != 0) {
    fail(ErrorKind::kRuntime, "cuFile refuses to register ", bytes, " bytes of device memory: ", text_of(error), ".");
  }
}

void CuFile::remove(const void* memory) { functions_->buffer_deregister(memory); }

CuFile::File::File(CuFile& library, const std::string& path, bool write) : library_(library), path_(path) {
  const int flags = (write ? O_RDWR | O_CREAT : O_RDONLY) | O_CLOEXEC;
  int number = ::open(path.c_str(), flags | O_DIRECT, 0666);
  if (number < 0 && errno == EINVAL) number = ::open(path.c_str(), flags, 0666);
  if (number < 0) fail_file(errno, write ? "open for writing" : "open for reading", path);
  file_ = Descriptor(number);
  CuFileDescription description = {};
  description.type = kLinuxDescriptor;
  description.file.number = number;
  const CuFileError error = library_.functions_->handle_register(&handle_, &description);
  if (error.code != 0) {
    fail(ErrorKind::kRuntime, "cuFile refuses the file ", path, ": ", text_of(error),
         ". Its file system may have no GPUDirect storage: use aio_handle.");
  }
}

CuFile::File::~File() {
  if (handle_ != nullptr) library_.functions_->handle_deregister(handle_);
}

void CuFile::File::read(void* base, uint64_t at, uint64_t bytes, uint64_t offset) const {
  for (uint64_t done = 0; done < bytes;) {
    errno = 0;
    const ssize_t got = library_.functions_->read(handle_, base, bytes - done, static_cast<off_t>(offset + done),
                                                  static_cast<off_t>(at + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_transfer(errno ? errno : EIO, "read", path_, offset + done, bytes - done);
    if (got == 0) fail_truncated(path_, offset + done, offset, bytes);
    done += static_cast<uint64_t>(got);
  }
}

void CuFile::File::write(const void* base, uint64_t at, uint64_t bytes, uint64_t offset) const {
  for (uint64_t done = 0; done < bytes;) {
    errno = 0;
    const ssize_t put = library_.functions_->write(handle_, base, bytes - done, static_cast<off_t>(offset + done),
                                                   static_cast<off_t>(at + done));
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) fail_transfer(errno ? errno : EIO, "write", path_, offset + done, bytes - done);
    done += static_cast<uint64_t>(put);
  }
}

}  // namespace ds::io
