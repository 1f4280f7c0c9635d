// Moves a range of a file to or from memory with several requests on their way.
#pragma once
#include <cstdint>
#include <vector>

#include "io/async/async_file.h"
#include "io/async/block_file.h"

namespace ds::io {

// The values are for users without a configuration; an engine and an aio_handle name theirs.
struct TransferOptions {
  size_t block_bytes = 1 << 20;  // one request; rounded up to kBlockBytes where the file has O_DIRECT
  int queue_depth = 8;           // requests at a time
  // False: the system is told of many requests in one call. True: of each by itself.
  bool single_submit = false;
  // False: requests that are complete are replaced when half of the queue is. True: each at once.
  bool overlap_events = true;
  Backend backend = Backend::kAuto;
};

// Throws ErrorKind::kValue, naming the parameter of aio_handle.
void check(const TransferOptions& options);

// Memory that the kernel cannot transfer to or from: of a device, or at an address that O_DIRECT does not take. Bytes
// pass through aligned host memory. Called by one thread at a time for one transfer, by several for several.
class RemoteMemory {
 public:
  virtual ~RemoteMemory() = default;
  virtual void load(char* host, uint64_t at, size_t bytes) = 0;         // from byte `at` of the memory
  virtual void store(const char* host, uint64_t at, size_t bytes) = 0;  // to byte `at` of the memory
};

struct Span {
  char* host = nullptr;            // the bytes, or
  RemoteMemory* remote = nullptr;  // the memory's owner
  uint64_t begin = 0;              // their first byte there
  uint64_t bytes = 0;
};

// The bytes of the span are those of the file from `offset` on. Any sizes, offsets and addresses. Throws FileError with
// path, offset and bytes; a file that ends before is ENODATA.
void read_span(BlockFile& file, const Span& span, uint64_t offset, const TransferOptions& options);
void write_span(BlockFile& file, const Span& span, uint64_t offset, const TransferOptions& options);

// Compares a span with the file as the page cache shows it, once it was read or written: throws ErrorKind::kRuntime
// naming the first byte that differs.
void compare_span(BlockFile& file, const Span& span, uint64_t offset);

// `parts` runs that make up `bytes` from `offset` on, cut at multiples of kBlockBytes of the file; fewer for few bytes.
std::vector<std::pair<uint64_t, uint64_t>> parts_of(uint64_t offset, uint64_t bytes, int parts);

}  // namespace ds::io
