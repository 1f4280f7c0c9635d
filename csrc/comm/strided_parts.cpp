#include "comm/strided_parts.h"

#include <ATen/Functions.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/error.h"

namespace ds::comm {

namespace {

using Views = StridedParts::Views;

std::vector<int64_t> counts_of(const Views& views) {
  std::vector<int64_t> counts;
  for (const auto& of_rank : views) {
    counts.push_back(0);
    for (const at::Tensor& view : of_rank) counts.back() += view.numel();
  }
  return counts;
}

std::vector<std::vector<StridedRows>> rows_of_views(const Views& views) {
  std::vector<std::vector<StridedRows>> rows;
  for (const auto& of_rank : views) {
    rows.emplace_back();
    for (const at::Tensor& view : of_rank) rows.back().emplace_back(view);
  }
  return rows;
}

// Calls visit(rows, begin in them, bytes, bytes before) for each view that has some of [begin, begin + bytes).
template <typename Visit>
void over_views(const std::vector<StridedRows>& views, size_t begin, size_t bytes, const Visit& visit) {
  size_t start = 0, done = 0;
  for (const StridedRows& view : views) {
    if (done == bytes) return;
    const size_t stop = start + view.bytes(), from = begin + done;
    if (from < stop) {
      const size_t here = std::min(bytes - done, stop - from);
      visit(view, from - start, here, done);
      done += here;
    }
    start = stop;
  }
}

template <typename Copy>
void over_flat(const Views& views, const at::Tensor& flat, const Copy& copy) {
  int64_t begin = 0;
  for (const auto& of_rank : views)
    for (const at::Tensor& view : of_rank) {
      copy(view, flat.narrow(0, begin, view.numel()).view(view.sizes()));
      begin += view.numel();
    }
}

}  // namespace

StridedRows::StridedRows(const at::Tensor& view)
    : data_(static_cast<char*>(view.data_ptr())), row_(view.element_size()), bytes_(view.nbytes()) {
  const size_t width = view.element_size();
  // Dimensions that adjoin become one, from the innermost on.
  for (int64_t dim = view.dim() - 1; dim >= 0; --dim) {
    const auto size = static_cast<size_t>(view.size(dim)), stride = static_cast<size_t>(view.stride(dim)) * width;
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

template <typename Visit>
void StridedRows::runs(size_t begin, size_t bytes, const Visit& visit) const {
  if (bytes == 0) return;
  if (sizes_.empty()) return visit(data_ + begin, bytes);
  size_t row = begin / row_, inside = begin % row_;
  c10::SmallVector<size_t, 6> index(sizes_.size());
  char* base = data_;  // of the innermost dimension
  const size_t last = sizes_.size() - 1;
  for (size_t dim = sizes_.size(); dim-- > 0; row /= sizes_[dim]) index[dim] = row % sizes_[dim];
  for (size_t dim = 0; dim < last; ++dim) base += index[dim] * strides_[dim];
  for (;;) {
    char* at = base + index[last] * strides_[last];
    for (; index[last] < sizes_[last]; ++index[last], at += strides_[last]) {
      const size_t here = std::min(bytes, row_ - inside);
      visit(at + inside, here);
      inside = 0;
      bytes -= here;
      if (bytes == 0) return;
    }
    index[last] = 0;
    for (size_t dim = last; dim-- > 0;) {
      base += strides_[dim];
      if (++index[dim] < sizes_[dim]) break;
      base -= sizes_[dim] * strides_[dim];
      index[dim] = 0;
    }
  }
}

void StridedRows::copy_to(char* out, size_t begin, size_t bytes) const {
  runs(begin, bytes, [&](const char* here, size_t count) {
    std::memcpy(out, here, count);
    out += count;
  });
}

void StridedRows::copy_from(const char* in, size_t begin, size_t bytes) const {
  runs(begin, bytes, [&](char* here, size_t count) {
    std::memcpy(here, in, count);
    in += count;
  });
}

StridedParts::StridedParts(Views give, Views take)
    : give_(std::move(give)), take_(std::move(take)), give_counts_(counts_of(give_)), take_counts_(counts_of(take_)) {
  for (const Views* views : {&give_, &take_})
    for (const auto& of_rank : *views)
      for (const at::Tensor& view : of_rank) {
        if (!some_.defined() || (some_.numel() == 0 && view.device() == some_.device())) some_ = view;
        if (view.scalar_type() != some_.scalar_type() || view.device() != some_.device())
          fail(ErrorKind::kType, "tensors of one exchange are ", c10::toString(some_.scalar_type()), " on ",
               some_.device().str(), " and ", c10::toString(view.scalar_type()), " on ", view.device().str(),
               ": make them one dtype on one device");
      }
  if (!some_.defined()) fail(ErrorKind::kValue, "an exchange without tensors");
  if (give_.size() != take_.size())
    fail(ErrorKind::kValue, "an exchange gives to ", give_.size(), " ranks and takes from ", take_.size());
  if (!some_.device().is_cpu()) return;
  give_rows_ = rows_of_views(give_);
  take_rows_ = rows_of_views(take_);
}

void StridedParts::read(int to, size_t begin, size_t bytes, char* out) const {
  over_views(give_rows_[to], begin, bytes, [&](const StridedRows& view, size_t from, size_t count, size_t before) {
    view.copy_to(out + before, from, count);
  });
}

void StridedParts::write(int from, size_t begin, size_t bytes, const char* in) const {
  over_views(take_rows_[from], begin, bytes, [&](const StridedRows& view, size_t at, size_t count, size_t before) {
    view.copy_from(in + before, at, count);
  });
}

void StridedParts::keep(int me, size_t begin, size_t bytes) const {
  size_t from = begin;
  over_views(take_rows_[me], begin, bytes, [&](const StridedRows& view, size_t at, size_t count, size_t) {
    view.runs(at, count, [&](char* here, size_t n) {
      over_views(give_rows_[me], from, n, [&](const StridedRows& source, size_t start, size_t some, size_t before) {
        source.copy_to(here + before, start, some);
      });
      from += n;
    });
  });
}

void StridedParts::pack(const at::Tensor& flat) const {
  over_flat(give_, flat, [](const at::Tensor& view, const at::Tensor& part) { part.copy_(view); });
}

void StridedParts::unpack(const at::Tensor& flat) const {
  over_flat(take_, flat, [](const at::Tensor& view, const at::Tensor& part) { view.copy_(part); });
}

Op strided_all_to_all(const std::shared_ptr<const StridedParts>& parts, const std::string& tag, bool detached) {
  const auto placeholder = [&](const std::vector<int64_t>& counts) {
    return parts->some().as_strided({std::accumulate(counts.begin(), counts.end(), int64_t{0})}, {0});
  };
  Op op;
  op.verb = Verb::kAllToAll;
  op.in = placeholder(parts->give_counts());
  op.out = placeholder(parts->take_counts());
  op.in_counts = parts->give_counts();
  op.out_counts = parts->take_counts();
  op.tag = tag;
  op.detached = detached;
  op.parts = parts;
  return op;
}

}  // namespace ds::comm
