// What a rank gives to each rank and takes from it in one all_to_all, where it lies: views of tensors with any strides.
// Ranks that share memory copy each row once into it and once to where it belongs; for others it is packed.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/op.h"

namespace ds::comm {

// Rows of adjoining bytes, `rows` apart in several dimensions: a view in the order of its dimensions.
class StridedRows {
 public:
  // No dimension of `view` is turned around (negative strides do not exist in torch).
  explicit StridedRows(const at::Tensor& view);
  size_t bytes() const { return bytes_; }
  // Bytes [begin, begin + bytes) of the view, as if it were contiguous: visit(where they are, how many) for each run.
  template <typename Visit>
  void runs(size_t begin, size_t bytes, const Visit& visit) const;
  void copy_to(char* out, size_t begin, size_t bytes) const;
  void copy_from(const char* in, size_t begin, size_t bytes) const;

 private:
  char* data_;
  size_t row_, bytes_;
  std::vector<size_t> sizes_, strides_;  // of rows, outermost first; bytes
};

class StridedParts {
 public:
  using Views = std::vector<std::vector<at::Tensor>>;  // by rank, any number for each

  // All of one dtype and on one device, at least one of them. To rank r go the elements of give[r], view after view,
  // each in the order of its dimensions; so they arrive in the views that r takes from here, which must have as many in
  // all. No two elements of `take` share memory, with each other or with an element of `give`.
  StridedParts(Views give, Views take);

  const Views& give() const { return give_; }
  const Views& take() const { return take_; }
  const std::vector<int64_t>& give_counts() const { return give_counts_; }
  const std::vector<int64_t>& take_counts() const { return take_counts_; }
  const at::Tensor& some() const { return some_; }  // for dtype and device

  // In host memory: bytes of what goes to a rank, of what has come from one, and of what rank `me` gives itself.
  void read(int to, size_t begin, size_t bytes, char* out) const;
  void write(int from, size_t begin, size_t bytes, const char* in) const;
  void keep(int me, size_t begin, size_t bytes) const;
  // Anywhere: all of it, rank after rank.
  void pack(const at::Tensor& flat) const;
  void unpack(const at::Tensor& flat) const;

 private:
  using Rows = std::vector<std::vector<StridedRows>>;

  Views give_, take_;
  Rows give_rows_, take_rows_;  // in host memory
  std::vector<int64_t> give_counts_, take_counts_;
  at::Tensor some_;
};

// The call that carries them. Its tensors only say dtype, device and how many elements there are.
Op strided_all_to_all(const std::shared_ptr<const StridedParts>& parts, const std::string& tag, bool detached = false);

}  // namespace ds::comm
