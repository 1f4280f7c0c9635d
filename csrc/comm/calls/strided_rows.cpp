// Copies rows of strided views into shared memory and out of it (strided_parts.h).
#include <ATen/Functions.h>

#include <algorithm>
#include <cstring>

#include "comm/calls/strided_parts.h"
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace ds::comm {

namespace {

using RowList = c10::SmallVector<StridedRows, 3>;

constexpr size_t kLine = 64;
// Below this a row is written as usual: its first and last lines are shared with others.
constexpr size_t kLeastStreamed = 256;
// Bytes for one rank, at least, before the next one's turn, and at most in one copy.
constexpr size_t kTurn = 2048, kMost = 4096;
// The distance in bytes at which memory is prefetched.
constexpr size_t kAhead = 16384;

void copy_row(char* to, const char* from, size_t bytes, bool past_caches) {
#if defined(__SSE2__)
  if (past_caches && bytes >= kLeastStreamed) {
    const size_t before = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
    std::memcpy(to, from, before);
    size_t at = before;
    for (; at + kLine <= bytes; at += kLine) {
      __m128i line[4];
      for (size_t i = 0; i < 4; ++i) line[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at) + i);
      for (size_t i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to + at) + i, line[i]);
    }
    std::memcpy(to + at, from + at, bytes - at);
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

}  // namespace

StridedRows::StridedRows(const StridedView& view)
    : data_(static_cast<char*>(view.of.data_ptr())),
      row_(view.of.element_size()),
      bytes_(static_cast<size_t>(view.numel()) * row_) {
  if (bytes_ == 0) return;
  const size_t width = row_;
  data_ += (view.offset - view.of.storage_offset()) * static_cast<int64_t>(width);
  // Dimensions that adjoin become one, from the innermost on.
  for (size_t dim = view.sizes.size(); dim-- > 0;) {
    const auto size = static_cast<size_t>(view.sizes[dim]), stride = static_cast<size_t>(view.strides[dim]) * width;
    if (size == 1) continue;
    if (sizes_.empty() && stride == row_) {
      row_ *= size;
    } else if (!sizes_.empty() && stride == sizes_.back() * strides_.back()) {
      sizes_.back() *= size;
    } else {
      sizes_.push_back(size);
      strides_.push_back(stride);
    }
  }
  std::reverse(sizes_.begin(), sizes_.end());
  std::reverse(strides_.begin(), strides_.end());
}

// Goes through bytes [begin, begin + bytes) of rows, run by run.
class RowCursor {
 public:
  RowCursor(const RowList& views, size_t begin, size_t bytes) : view_(views.begin()), left_(bytes) {
    if (left_ == 0) return;
    for (; begin >= view_->bytes(); ++view_) begin -= view_->bytes();
    enter(begin);
  }
  size_t left() const { return left_; }
  size_t run() const { return run_; }  // bytes that lie together here
  char* at() const { return at_; }
  // The address that is read after about kAhead more bytes.
  const char* ahead() const { return at_ + ahead_; }
  void skip(size_t bytes) {  // at most the run
    at_ += bytes;
    run_ -= bytes;
    left_ -= bytes;
    if (run_ == 0 && left_ > 0) next_row();
  }

 private:
  void enter(size_t begin) {
    const auto& sizes = view_->sizes_;
    size_t row = begin / view_->row_;
    start_ = view_->data_;
    index_.resize(sizes.size());
    for (size_t dim = sizes.size(); dim-- > 0; row /= sizes[dim]) {
      index_[dim] = row % sizes[dim];
      start_ += index_[dim] * view_->strides_[dim];
    }
    const size_t apart = sizes.empty() ? 0 : view_->strides_.back();
    ahead_ = apart == 0 || apart >= kAhead ? std::max(apart, kAhead) : (kAhead + apart - 1) / apart * apart;
    begin_run(begin % view_->row_);
  }
  void begin_run(size_t inside) {
    at_ = start_ + inside;
    run_ = std::min(view_->row_ - inside, left_);
  }
  void next_row() {
    for (size_t dim = index_.size(); dim-- > 0;) {
      if (++index_[dim] < view_->sizes_[dim]) {
        start_ += view_->strides_[dim];
        return begin_run(0);
      }
      index_[dim] = 0;
      start_ -= (view_->sizes_[dim] - 1) * view_->strides_[dim];
    }
    do {
      ++view_;
    } while (view_->bytes() == 0);
    enter(0);
  }

  const StridedRows* view_;
  size_t left_, run_ = 0, ahead_ = 0;
  char *at_ = nullptr, *start_ = nullptr;  // of the row
  c10::SmallVector<size_t, 4> index_;      // of the row
};

namespace {

void ask_for(const RowCursor& rows, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kLine) __builtin_prefetch(rows.ahead() + at, 0, 2);
}

struct ToSlot {
  RowCursor from;
  char* to;

  void turn(bool past_caches) {
    for (size_t done = 0; done < kTurn && from.left() > 0;) {
      const size_t bytes = std::min(from.run(), kMost);
      if (past_caches) ask_for(from, bytes);
      std::memcpy(to, from.at(), bytes);
      to += bytes;
      done += bytes;
      from.skip(bytes);
    }
  }
};

struct ToOwn {
  RowCursor from, to;

  void turn(bool past_caches) {
    for (size_t done = 0; done < kTurn && from.left() > 0;) {
      const size_t bytes = std::min({from.run(), to.run(), kMost});
      if (past_caches) ask_for(from, bytes);
      if (from.at() != to.at()) copy_row(to.at(), from.at(), bytes, past_caches);
      done += bytes;
      from.skip(bytes);
      to.skip(bytes);
    }
  }
};

}  // namespace

void give_rows(const RowsOfRanks& rows, const std::vector<RowsInSlot>& slots, int me, size_t begin, size_t bytes,
               bool past_caches) {
  c10::SmallVector<ToSlot, 8> others;
  for (const RowsInSlot& slot : slots) others.push_back({{rows.give[slot.rank], slot.begin, slot.bytes}, slot.slot});
  ToOwn own{{rows.give[me], begin, bytes}, {rows.take[me], begin, bytes}};
  for (bool more = true; more;) {
    more = own.from.left() > 0;
    if (more) own.turn(past_caches);
    for (ToSlot& other : others) {
      if (other.from.left() == 0) continue;
      other.turn(past_caches);
      more = true;
    }
  }
}

void take_rows(const RowsOfRanks& rows, const RowsInSlot& from, bool past_caches) {
  const char* slot = from.slot;
  for (RowCursor to(rows.take[from.rank], from.begin, from.bytes); to.left() > 0;) {
    const size_t bytes = to.run();
    copy_row(to.at(), slot, bytes, past_caches);
    slot += bytes;
    to.skip(bytes);
  }
}

void finish_stores() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

size_t RowsOfRanks::bytes_taken() const {
  size_t bytes = 0;
  for (const auto& of_rank : take)
    for (const StridedRows& one : of_rank) bytes += one.bytes();
  return bytes;
}

}  // namespace ds::comm
