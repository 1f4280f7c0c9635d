// Spreads a kernel's elements over a thread pool.
#pragma once
#include <algorithm>
#include <cstddef>
#include <functional>
#include <vector>

#include "kernels/launch.h"

namespace ds::kernels::cpu {

// Up to this many elements a wake-up costs more than the work: 10 to 50 us, on a busy machine, against 10 to 100.
constexpr size_t kInline = 32768;
// Chunks are multiples of this.
constexpr size_t kGrain = 8192;

// Calls body(begin, end) for pieces of [0, n).
template <typename Body>
void split(const Launch& launch, size_t n, const Body& body) {
  if (n == 0) return;
  if (launch.pool == nullptr || n <= kInline) return body(size_t{0}, n);
  launch.pool->parallel_for(n, kGrain, std::cref(body));
}

// Rows of `size` elements that a thread takes at a time.
inline size_t row_grain(size_t size) { return std::max<size_t>(1, kGrain / std::max<size_t>(1, size)); }

// Calls body(begin, end) for pieces of `rows` rows of `size` elements.
template <typename Body>
void split_rows(const Launch& launch, size_t rows, size_t size, const Body& body) {
  if (rows == 0) return;
  if (launch.pool == nullptr || rows * size <= kInline) return body(size_t{0}, rows);
  launch.pool->parallel_for(rows, row_grain(size), std::cref(body));
}

// Calls body(s, begin, end) for pieces of every segment s, balanced by elements, not by segments: a pool of four gets
// through one large tensor as evenly as through a thousand small ones. `width`: elements of
// the blocks that are counted.
template <typename AnySegment, typename Body>
void split_segments(const Launch& launch, const AnySegment* segments, size_t count, const Body& body,
                    size_t width = 1) {
  size_t total = 0;
  for (size_t s = 0; s < count; ++s) total += segments[s].numel;
  if (launch.pool == nullptr || total * width <= kInline) {
    for (size_t s = 0; s < count; ++s)
      if (segments[s].numel != 0) body(s, size_t{0}, segments[s].numel);
    return;
  }
  std::vector<size_t> ends(count);  // of each segment, in the row of all elements
  for (size_t s = 0, end = 0; s < count; ++s) ends[s] = end += segments[s].numel;
  launch.pool->parallel_for(total, std::max<size_t>(1, kGrain / width), [&](size_t begin, size_t end) {
    size_t s = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    while (begin < end) {
      const size_t first = ends[s] - segments[s].numel;
      const size_t stop = std::min(end, ends[s]);
      if (begin < stop) body(s, begin - first, stop - first);
      begin = stop;
      ++s;
    }
  });
}

}  // namespace ds::kernels::cpu
