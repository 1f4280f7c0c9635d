// all_to_all on strided views, without packing: the parts that a rank sends to each rank and receives from it.
// Ranks that share memory copy each row once into it and once to its destination; other transports pack the rows.
//
// [Note: one pass over what is given]
// Rows of different ranks adjoin: of each token its heads go to all of them. So a step copies by turns a few rows for
// each rank, this one included, and reads its memory once, in order; rank by rank it would read every other piece of
// each page several times. Large results are written past the caches, which saves reading each line before it is
// written and leaves the caches to the slots; and what will be read is asked for some rows before. Measured on two
// cores at 64 MB: 14.2 ms rank by rank, 12.5 in one pass, 11.2 so; an all_gather of as many bytes 11.1.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/calls/op.h"

namespace ds::comm {

// A part of a tensor, in the order of its dimensions. Cheaper to make than a tensor: there are many in a call.
struct StridedView {
  StridedView(const at::Tensor& whole);  // NOLINT(google-explicit-constructor): all of it
  StridedView(at::Tensor of, c10::SmallVector<int64_t, 5> sizes, c10::SmallVector<int64_t, 5> strides, int64_t offset)
      : of(std::move(of)), sizes(std::move(sizes)), strides(std::move(strides)), offset(offset) {}
  int64_t numel() const;
  at::Tensor tensor() const;

  at::Tensor of;
  c10::SmallVector<int64_t, 5> sizes, strides;  // of elements
  int64_t offset;                               // in the storage of `of`
};

// Rows of adjoining bytes, any way apart in several dimensions.
class StridedRows {
 public:
  StridedRows(char* data, size_t bytes) : data_(data), row_(bytes), bytes_(bytes) {}  // one row
  explicit StridedRows(const StridedView& view);                                      // in host memory
  size_t bytes() const { return bytes_; }

 private:
  friend class RowCursor;
  char* data_;
  size_t row_, bytes_;
  c10::SmallVector<size_t, 4> sizes_, strides_;  // of rows, outermost first; bytes
};

// For each rank what one rank gives to it and takes from it, in host memory; both in the order in which it travels.
struct RowsOfRanks {
  std::vector<c10::SmallVector<StridedRows, 3>> give, take;
  size_t bytes_taken() const;
};

// Some of what travels between two ranks: bytes [begin, begin + bytes) of it, in a slot.
struct RowsInSlot {
  int rank;  // the other one
  size_t begin, bytes;
  char* slot;
};

// Copies into slots what they name, and, in the same pass, [begin, begin + bytes) of what rank `me` gives itself to
// where it belongs. `past_caches`: see the note; finish_stores() must follow before others may read.
void give_rows(const RowsOfRanks& rows, const std::vector<RowsInSlot>& slots, int me, size_t begin, size_t bytes,
               bool past_caches);
void take_rows(const RowsOfRanks& rows, const RowsInSlot& from, bool past_caches);
void finish_stores();

class StridedParts {
 public:
  using Views = std::vector<std::vector<StridedView>>;  // by rank, any number for each

  // All of one dtype and on one device, at least one of them. To rank r go the elements of give[r], view after view,
  // each in the order of its dimensions; so they arrive in the views that r takes from here, which must have as many in
  // all. No two elements of `take` share memory, with each other or with an element of `give`.
  StridedParts(Views give, Views take);

  const Views& give() const { return give_; }
  const Views& take() const { return take_; }
  const std::vector<int64_t>& give_counts() const { return give_counts_; }
  const std::vector<int64_t>& take_counts() const { return take_counts_; }
  const at::Tensor& some() const { return some_; }  // for dtype and device
  RowsOfRanks rows() const;                         // in host memory

  // Anywhere: all of it, rank after rank.
  void pack(const at::Tensor& flat) const;
  void unpack(const at::Tensor& flat) const;

 private:
  Views give_, take_;
  std::vector<int64_t> give_counts_, take_counts_;
  at::Tensor some_;
};

// The call that carries them. Its tensors only say dtype, device and how many elements there are.
Op strided_all_to_all(const std::shared_ptr<const StridedParts>& parts, const std::string& tag, bool detached = false);

}  // namespace ds::comm
