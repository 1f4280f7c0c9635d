// Buffers whose address and size suit O_DIRECT, handed out and taken back.
#pragma once
#include <cstddef>
#include <memory>
#include <vector>

namespace ds::io {

constexpr size_t kBlockBytes = 4096;  // O_DIRECT wants addresses, sizes and offsets in multiples of at most this

inline size_t round_up(size_t bytes, size_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

// One thread at a time.
class AlignedPool {
 public:
  // `buffers` >= 1 of `bytes` each, rounded up to kBlockBytes, at least one block. Throws ErrorKind::kRuntime when the
  // memory is not there.
  AlignedPool(size_t buffers, size_t bytes);

  size_t buffer_bytes() const { return buffer_bytes_; }
  size_t available() const { return free_.size(); }

  // null when all are out. Contents are whatever was there.
  char* take();
  void give_back(char* buffer) { free_.push_back(buffer); }

 private:
  struct Release {
    size_t bytes;
    void operator()(char* memory) const;
  };

  size_t buffer_bytes_;
  std::unique_ptr<char, Release> memory_;
  std::vector<char*> free_;
};

}  // namespace ds::io
