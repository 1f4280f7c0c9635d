// Bytes that will be written to a file: in memory as they are, or brought there a piece at a time.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace ds::io {

// Host memory of at most `bytes` through which sources pass that are elsewhere, or have gaps. Made by who needs it.
struct Staging {
  uint64_t bytes = 32 << 20;
  bool always = false;  // sources in memory pass through it, too, where they can
  std::shared_ptr<void> pageable, pinned;
};

// A piece of memory, valid until the call returns.
using TakePiece = std::function<void(const void* data, uint64_t bytes)>;

class ByteSource {
 public:
  virtual ~ByteSource() = default;
  virtual uint64_t bytes() const = 0;
  // Whether its pieces are its own memory, which stays where it is.
  virtual bool in_place() const = 0;
  virtual bool on_device() const { return false; }
  // All bytes, in order.
  virtual void each(Staging& staging, const TakePiece& take) const = 0;
  // Bytes `begin` to `end`. From a device into pinned memory the copy is only queued.
  virtual void copy_range(char* to, uint64_t begin, uint64_t end) const = 0;
};

using SourcePtr = std::shared_ptr<ByteSource>;

struct MemoryPiece {
  const char* data;
  uint64_t bytes;
};

// Pieces of memory, of which `owner` keeps all; without one, somebody else does.
class MemorySource : public ByteSource {
 public:
  explicit MemorySource(std::vector<MemoryPiece> pieces, std::shared_ptr<void> owner = {});
  uint64_t bytes() const override { return bytes_; }
  bool in_place() const override { return true; }
  void each(Staging& staging, const TakePiece& take) const override;
  void copy_range(char* to, uint64_t begin, uint64_t end) const override;

 private:
  std::vector<MemoryPiece> pieces_;
  std::shared_ptr<void> owner_;
  uint64_t bytes_ = 0;
};

// Sources end to end.
class JoinedSource : public ByteSource {
 public:
  explicit JoinedSource(std::vector<SourcePtr> parts);
  uint64_t bytes() const override { return bytes_; }
  bool in_place() const override;
  bool on_device() const override;
  void each(Staging& staging, const TakePiece& take) const override;
  void copy_range(char* to, uint64_t begin, uint64_t end) const override;

 private:
  std::vector<SourcePtr> parts_;
  uint64_t bytes_ = 0;
};

// Bytes `begin` to `end` of another source.
class SlicedSource : public ByteSource {
 public:
  SlicedSource(SourcePtr source, uint64_t begin, uint64_t end);  // ErrorKind::kValue for a range outside of it
  uint64_t bytes() const override { return end_ - begin_; }
  bool in_place() const override { return source_->in_place(); }
  bool on_device() const override { return source_->on_device(); }
  void each(Staging& staging, const TakePiece& take) const override;
  void copy_range(char* to, uint64_t begin, uint64_t end) const override;

 private:
  SourcePtr source_;
  uint64_t begin_, end_;
};

}  // namespace ds::io
