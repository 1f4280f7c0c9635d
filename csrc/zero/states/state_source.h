// Masters or states of this rank end to end, as bytes for a file: read row by row from where they rest, when they are
// written down. No more than a row is in memory for it.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/byte_source.h"
#include "zero/spaces/param_store.h"

namespace ds::zero {

class StateSource : public io::ByteSource {
 public:
  // A run of elements of a piece, which begins at an element of the source.
  struct Run {
    int64_t at;
    Piece piece;
    Buffer buffer;
  };

  // `numel` fp32 elements, zero where no run is. Runs ascend and do not overlap. `owner` keeps the store.
  StateSource(std::shared_ptr<const void> owner, const ParamStore& store, std::vector<Run> runs, int64_t numel)
      : owner_(std::move(owner)), store_(store), runs_(std::move(runs)), numel_(numel) {}

  uint64_t bytes() const override { return static_cast<uint64_t>(numel_) * sizeof(float); }
  bool in_place() const override { return false; }
  void each(io::Staging& staging, const io::TakePiece& take) const override;
  void copy_range(char* to, uint64_t begin, uint64_t end) const override;

 private:
  // Calls take(data, bytes) for elements `begin` to `end`, in order.
  void walk(int64_t begin, int64_t end, const io::TakePiece& take) const;

  const std::shared_ptr<const void> owner_;
  const ParamStore& store_;
  const std::vector<Run> runs_;
  const int64_t numel_;
};

}  // namespace ds::zero
