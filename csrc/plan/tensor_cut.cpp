#include "plan/tensor_cut.h"

#include "base/error.h"
#include "base/ranges.h"
#include "base/sizes.h"

namespace ds::plan {
namespace {

void check_count(int64_t count, int64_t ranks) {
  if (ranks < 1) fail(ErrorKind::kValue, "a cut needs 1 rank or more, got ", ranks);
  if (count < 0) fail(ErrorKind::kValue, count, " units cannot be cut for ", ranks, " ranks: a count is 0 or more");
}

// `runs` of `width` units each, behind `start` others.
void append_scaled(std::vector<UnitRun>& all, const std::vector<UnitRun>& runs, int64_t width, int64_t start) {
  for (const auto& [first, stop] : runs) all.emplace_back(start + first * width, start + stop * width);
}

}  // namespace

std::vector<UnitRun> unit_runs(int64_t count, int64_t ranks) {
  check_count(count, ranks);
  std::vector<UnitRun> runs;
  for (int64_t rank = 0, start = 0; rank < ranks; ++rank) {
    const int64_t stop = start + count / ranks + (rank < count % ranks ? 1 : 0);
    runs.emplace_back(start, stop);
    start = stop;
  }
  return runs;
}

std::vector<UnitRun> shared_runs(const std::vector<UnitRun>& runs, int64_t readers, int64_t count) {
  if (readers < 1) fail(ErrorKind::kValue, "a key/value head needs 1 query head or more that read it, got ", readers);
  const int64_t all = sizes::product("query heads", readers, count);
  std::vector<UnitRun> shared;
  for (const auto& [start, stop] : runs) {
    if (start < 0 || stop < start || stop > all) {
      fail(ErrorKind::kValue, "a run of query heads from ", start, " to ", stop, ": ", count, " key/value heads with ",
           readers, " readers each have ", all, " query heads");
    }
    shared.push_back(start < stop ? UnitRun{start / readers, (stop - 1) / readers + 1} : UnitRun{0, 0});
  }
  return shared;
}

std::pair<std::vector<UnitRun>, std::vector<UnitRun>> grouped_runs(int64_t query, int64_t kv, int64_t ranks) {
  if (kv < 1 || query < 1 || query % kv != 0) {
    fail(ErrorKind::kValue, "an attention of ", query, " query heads and ", kv,
         " key/value heads: the first must be a multiple of the second");
  }
  const int64_t readers = query / kv, copies = ranks / kv;
  std::vector<UnitRun> queries;
  if (kv >= ranks) {
    append_scaled(queries, unit_runs(kv, ranks), readers, 0);
  } else if (ranks % kv != 0) {
    queries = unit_runs(query, ranks);
  } else if (readers < copies) {
    fail(ErrorKind::kValue, "an attention of ", query, " query heads leaves some of ", ranks,
         " tensor-parallel ranks without one: use at most ", query, " ranks");
  } else {
    for (int64_t head = 0; head < kv; ++head) append_scaled(queries, unit_runs(readers, copies), 1, head * readers);
  }
  return {queries, shared_runs(queries, readers, kv)};
}

std::vector<int64_t> shard_sizes(int64_t total, int64_t ranks, int64_t grain, int64_t units) {
  if (grain < 1) fail(ErrorKind::kValue, "tp_grain_size is ", grain, ": it must be 1 or more");
  if (units < 0) fail(ErrorKind::kValue, units, " key/value heads: their number is 0 or more");
  check_count(total, ranks);
  int64_t width = total >= grain ? grain : 1;  // of what is dealt whole
  if (units > 0 && total % units == 0) width = total / units;
  std::vector<int64_t> found;
  for (const auto& [start, stop] : unit_runs(width > 0 ? total / width : 0, ranks)) {
    found.push_back((stop - start) * width);
  }
  return found;
}

TensorCut::TensorCut(const std::vector<int64_t>& sizes, const std::vector<std::vector<UnitRun>>& runs) {
  if (sizes.empty() || sizes.size() != runs.size()) {
    fail(ErrorKind::kValue, "a cut of ", sizes.size(), " sub-parameters with runs for ", runs.size(),
         ": give 1 or more, and runs for each");
  }
  ranks_ = static_cast<int>(runs[0].size());
  for (size_t sub = 0; sub < sizes.size(); ++sub) {
    const int64_t size = sizes[sub];
    if (size < 0) fail(ErrorKind::kValue, "sub-parameter ", sub, " has ", size, " elements");
    check_count(size, static_cast<int64_t>(runs[sub].size()));
    if (static_cast<int>(runs[sub].size()) != ranks_) {
      fail(ErrorKind::kValue, "sub-parameter ", sub, " has runs for ", runs[sub].size(), " ranks, sub-parameter 0 for ",
           ranks_);
    }
    std::vector<int64_t> edges{0, size};
    for (int rank = 0; rank < ranks_; ++rank) {
      const auto& [start, stop] = runs[sub][rank];
      if (start < 0 || stop < start || stop > size) {
        fail(ErrorKind::kValue, "rank ", rank, " has elements from ", start, " to ", stop, " of sub-parameter ", sub,
             ", which has ", size);
      }
      edges.insert(edges.end(), {start, stop});
    }
    sort_unique(edges);
    for (size_t at = 0; at + 1 < edges.size(); ++at) {
      Segment segment{size_ + edges[at], edges[at + 1] - edges[at], {}};
      for (int rank = 0; rank < ranks_; ++rank) {
        const auto& [start, stop] = runs[sub][rank];
        if (start <= edges[at] && edges[at] < stop) segment.ranks.push_back(rank);
      }
      if (segment.ranks.empty()) {
        fail(ErrorKind::kValue, "no rank has the elements from ", edges[at], " to ", edges[at + 1],
             " of sub-parameter ", sub);
      }
      segments_.push_back(std::move(segment));
    }
    size_ = sizes::sum("elements of sub-parameters", size_, size);
  }
}

void TensorCut::check(int rank) const {
  if (rank < 0 || rank >= ranks_)
    fail(ErrorKind::kValue, "rank ", rank, " is not one of the ", ranks_, " ranks of a cut");
}

std::vector<CutPiece> TensorCut::pieces(int rank, bool first_only) const {
  check(rank);
  std::vector<CutPiece> found;
  int64_t at = 0;  // in the slice
  for (const Segment& segment : segments_) {
    if (!contains(segment.ranks, rank)) continue;
    if (!first_only || segment.ranks.front() == rank) {
      const bool touches = !found.empty() && found.back().in_whole + found.back().length == segment.start;
      if (!touches) found.push_back({at, segment.start, 0});
      found.back().length += segment.length;
    }
    at += segment.length;
  }
  return found;
}

std::vector<std::pair<int64_t, int64_t>> TensorCut::runs(int rank) const {
  std::vector<std::pair<int64_t, int64_t>> found;
  for (const CutPiece& piece : pieces(rank, false)) found.emplace_back(piece.in_whole, piece.length);
  return found;
}

int64_t TensorCut::width(int rank) const {
  int64_t sum = 0;
  for (const CutPiece& piece : pieces(rank, false)) sum += piece.length;
  return sum;
}

std::vector<int> TensorCut::holders(int rank) const {
  check(rank);
  std::vector<int> found;
  for (const Segment& segment : segments_) {
    if (!contains(segment.ranks, rank)) continue;
    if (!found.empty() && found != segment.ranks) return {};
    found = segment.ranks;
  }
  return found.empty() ? std::vector<int>{rank} : found;
}

bool TensorCut::copied() const {
  return any_of(segments_, [](const Segment& one) { return one.ranks.size() > 1; });
}

bool TensorCut::mixed() const {
  std::vector<bool> single(static_cast<size_t>(ranks_)), shared = single;
  for (const Segment& segment : segments_) {
    for (const int rank : segment.ranks) (segment.ranks.size() > 1 ? shared : single)[static_cast<size_t>(rank)] = true;
  }
  for (size_t rank = 0; rank < single.size(); ++rank) {
    if (single[rank] && shared[rank]) return true;
  }
  return false;
}

}  // namespace ds::plan
