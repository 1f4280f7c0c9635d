// Memory for many blocks at once, in huge pages that they share, given back block by block.
//
// Most of the time of a read into fresh memory goes into finding its pages, one fault for each 4 KiB. Tensors by
// themselves are often too small for a huge page, or begin and end within one; end to end they fill them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace ds::io {

class MemoryArena : public std::enable_shared_from_this<MemoryArena> {
 public:
  static constexpr uint64_t kAlignment = 64;

  // A block for each size. Throws ErrorKind::kRuntime when the memory is not there.
  static std::shared_ptr<MemoryArena> make(const std::vector<uint64_t>& sizes);
  ~MemoryArena();
  MemoryArena(const MemoryArena&) = delete;
  MemoryArena& operator=(const MemoryArena&) = delete;

  char* block(size_t index) const { return data_ + offsets_[index]; }
  uint64_t bytes(size_t index) const { return sizes_[index]; }

  // What a block's last owner calls: pages that are the block's alone go back to the system now, the rest with the
  // arena. Blocks keep it with `shared_from_this`.
  void release(size_t index) const noexcept;

 private:
  explicit MemoryArena(const std::vector<uint64_t>& sizes);

  std::vector<uint64_t> sizes_, offsets_;
  uint64_t mapped_bytes_ = 0;
  char* mapped_ = nullptr;
  char* data_ = nullptr;
};

}  // namespace ds::io
