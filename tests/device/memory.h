// Memory of the stand-in devices and pinned memory of the host. Each is one memfd that is mapped twice: at the
// addresses that tensors carry, closed to the host in part or whole, and at addresses that only operations use.
#pragma once
#include <c10/core/Allocator.h>

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "streams.h"

namespace standin {

constexpr size_t kPage = 4096;

class Mapping {
 public:
  Mapping(const char* name, int protection);
  Mapping(const Mapping&) = delete;

  bool holds(const void* address) const { return begin_ <= address && address < begin_ + kBytes; }
  char* begin() const { return begin_; }
  // The same byte, for operations.
  char* open(const void* address) const { return open_ + (static_cast<const char*>(address) - begin_); }
  // Whole pages, at the addresses that tensors carry.
  static void protect(const void* begin, const void* end, int protection);
  void drop(char* begin, size_t bytes) const;  // their content, so that they take no memory

  static constexpr size_t kBytes = size_t{32} << 30;  // of addresses

 private:
  void map();

  const char* name_;
  int protection_;
  char* begin_ = nullptr;
  char* open_ = nullptr;
  int file_ = -1;
};

struct Figures {
  size_t allocated = 0, allocated_peak = 0, reserved = 0, reserved_peak = 0, limit = size_t{4} << 30;
};

// One device. Freed memory goes to the stream that it was made on, and is used again at once: what follows on that
// stream comes after what is queued there. Other streams that use it are told by record_stream, else the order has a
// fault.
class DeviceMemory {
 public:
  explicit DeviceMemory(c10::DeviceIndex device);

  void* allocate(size_t bytes, Stream& stream);  // filled with 0xff, which is NaN in every floating dtype
  void release(void* address);
  void also_used_by(const void* address, Stream& stream);
  void give_back();  // what is not in use, after all work of the device, as cudaFree
  void limit(size_t bytes);
  Figures figures(bool new_peaks);

  const Mapping mapping;

 private:
  struct Block {
    size_t bytes = 0;    // whole pages
    size_t counted = 0;  // what figures count, 0: free
    Stream* owner = nullptr;
    std::set<Stream*> users;
    std::vector<Mark> last_uses;
  };
  using Blocks = std::map<char*, Block>;

  char* take(size_t bytes, Stream& stream, bool grows);  // null: there is no room
  void make_free(Blocks::iterator block);
  void settle();  // blocks that were in use by other streams when they were freed

  const c10::DeviceIndex device_;
  std::mutex mutex_;
  Blocks blocks_;
  std::map<std::pair<Stream*, size_t>, std::set<char*>> free_;
  std::vector<char*> unsettled_;
  std::map<char*, size_t> unreserved_;
  Figures figures_;
};

DeviceMemory& device_memory(c10::DeviceIndex device);

// Pages are closed to the host while an operation that uses them is queued: to all access while it writes, to writes
// while it reads. They are open again when the host has waited for it. Freed memory is used again when its operations
// have ended.
class PinnedMemory {
 public:
  PinnedMemory();

  void* allocate(size_t bytes);
  void release(void* address);

  // Under the order's mutex.
  void close(const OperationPtr& operation, const std::vector<Access>& accesses);
  void reopen();
  // A page fault of the host: reported if an operation is queued that uses the byte, once.
  void host_access(const char* address, bool write);

  const Mapping mapping;

 private:
  struct Use {
    OperationPtr operation;
    const char* begin;
    const char* end;
    bool write;
  };
  struct Block {
    size_t bytes = 0;
    bool used = false;
    std::vector<Use> uses;
  };
  using Blocks = std::map<const char*, Block>;

  Blocks::iterator block_of(const char* address);
  void protect(const char* begin, const Block& block);

  Blocks blocks_;
  std::set<const char*> closed_;
  char* unused_;
};

PinnedMemory& pinned_memory();

const Mapping* mapping_of(const void* address);  // null: memory of the host
void* open_address(const void* address);         // that of the host is its own

void also_used_by(const void* address, Stream& stream);  // memory of any device
c10::Allocator& device_allocator();                      // for the current stream of the current device
c10::Allocator& pinned_allocator();

}  // namespace standin
