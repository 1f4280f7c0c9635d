// Host memory that stays in place: page-locked (mlock), so that the kernel and devices transfer to and from it without
// looking for its pages each time.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace ds::io {

// All page-locked memory of a process that was asked for here. Any thread at any time. Outlived by its blocks: make it
// with make_shared.
class LockedPool : public std::enable_shared_from_this<LockedPool> {
 public:
  // The memory is there as long as the block is; locked until release() or the block's end. Page-aligned, zeroed.
  class Block {
   public:
    Block(std::shared_ptr<LockedPool> pool, char* data, size_t bytes)
        : pool_(std::move(pool)), data_(data), bytes_(bytes) {}
    ~Block();
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    char* data() const { return data_; }
    size_t bytes() const { return bytes_; }  // whole pages

   private:
    std::shared_ptr<LockedPool> pool_;
    char* data_;
    size_t bytes_;
  };

  // `bytes` >= 0. Throws ErrorKind::kRuntime where they cannot be locked: it names the limit and how many bytes are
  // missing.
  std::shared_ptr<Block> allocate(size_t bytes);

  // Whether all of it lies in one locked block.
  bool holds(const void* data, size_t bytes) const;

  // Unlocks the block that `data` lies in; its bytes stay where they are. False where there is none.
  bool release(const void* data);

  size_t locked_bytes() const;
  size_t peak_bytes() const;
  size_t blocks() const;

 private:
  void unlock(const char* data);

  mutable std::mutex lock_;
  std::map<const char*, size_t> locked_;  // by first byte
  size_t bytes_ = 0, peak_ = 0;
};

// "limit 65536 bytes, 61440 of them locked: 4096 bytes are missing", of locking `bytes` more in this process.
std::string memlock_shortage(size_t bytes);

}  // namespace ds::io
