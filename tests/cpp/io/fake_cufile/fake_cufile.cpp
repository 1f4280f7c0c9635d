// The library that tests of csrc/io/async/cufile.h open instead of cuFile: its functions over pread and pwrite, on host
// memory. Transfers are at most 1 MiB, as cuFile's may be short, too. Built three times: the whole, one whose driver
// does not open, one that lacks a function.
#include <fcntl.h>
#include <stddef.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <string>

struct CUfileError_t {
  int err;
  int cu_err;
};
struct CUfileDescr_t {
  int type;
  union {
    int fd;
    void* handle;
  } handle;
  const void* fs_ops;
};

static std::atomic<int> registered{0};

#define EXPORT extern "C" __attribute__((visibility("default")))

#ifdef FAKE_CUFILE_NO_DRIVER
EXPORT CUfileError_t cuFileDriverOpen() { return {5001, 100}; }
#else
EXPORT CUfileError_t cuFileDriverOpen() { return {0, 0}; }
#endif
EXPORT CUfileError_t cuFileDriverClose() { return {0, 0}; }
EXPORT CUfileError_t cuFileHandleRegister(void** handle, CUfileDescr_t* description) {
  if (description->type != 1) return {5022, 0};
  *handle = new int(description->handle.fd);
  return {0, 0};
}
EXPORT void cuFileHandleDeregister(void* handle) { delete static_cast<int*>(handle); }
EXPORT CUfileError_t cuFileBufRegister(const void* memory, size_t bytes, int) {
  if (memory == nullptr || bytes == 0) return {5011, 0};
  ++registered;
  return {0, 0};
}
EXPORT CUfileError_t cuFileBufDeregister(const void*) {
  --registered;
  return {0, 0};
}
EXPORT int fake_cufile_registered() { return registered; }

// In steps of whole blocks from a copy: the host's memory need not be aligned for O_DIRECT.
EXPORT ssize_t cuFileRead(void* handle, void* base, size_t bytes, off_t offset, off_t at) {
  alignas(4096) static thread_local char block[1 << 20];
  const off_t from = offset / 4096 * 4096;
  const size_t skip = static_cast<size_t>(offset - from);
  const ssize_t got = pread(*static_cast<int*>(handle), block, sizeof(block), from);
  if (got < 0) return -1;
  if (static_cast<size_t>(got) <= skip) return 0;
  const size_t now = std::min(bytes, static_cast<size_t>(got) - skip);
  std::copy_n(block + skip, now, static_cast<char*>(base) + at);
  return static_cast<ssize_t>(now);
}
#ifndef FAKE_CUFILE_BROKEN
EXPORT ssize_t cuFileWrite(void* handle, const void* base, size_t bytes, off_t offset, off_t at) {
  const std::string link = "/proc/self/fd/" + std::to_string(*static_cast<int*>(handle));
  const int number = open(link.c_str(), O_WRONLY);  // without O_DIRECT
  if (number < 0) return -1;
  const ssize_t put = pwrite(number, static_cast<const char*>(base) + at, std::min<size_t>(bytes, 1 << 20), offset);
  close(number);
  return put;
}
#endif
