#include "plan/shard_map.h"

#include <algorithm>

#include "base/error.h"
#include "base/sizes.h"

namespace ds::plan {

namespace {

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

ShardMap checked(const std::vector<int64_t>& numels, int64_t align, int64_t parts, int64_t max_numel) {
  if (align <= 0 || parts <= 0)
    fail(ErrorKind::kValue, "shard map: align ", align, " and parts ", parts, " must be positive");
  if (max_numel <= 0) fail(ErrorKind::kValue, "reduce_bucket_size must be positive, got ", max_numel);
  for (int64_t numel : numels)
    if (numel < 0) fail(ErrorKind::kValue, "shard map: a parameter has ", numel, " elements");
  // No number below is larger: each parameter is rounded up to `align`, and its bucket to `align` of each part.
  constexpr const char* kAll = "elements of a shard map, with padding";
  const int64_t padding = sizes::product(kAll, parts, sizes::sum(kAll, align, int64_t{2}));
  int64_t all = sizes::product(kAll, sizes::sum(kAll, padding, align), static_cast<int64_t>(numels.size()) + 1);
  for (const int64_t numel : numels) all = sizes::sum(kAll, all, numel);
  ShardMap map;
  map.parts = parts;
  map.numels = numels;
  map.offsets.assign(numels.size(), -1);
  map.bucket_of.assign(numels.size(), 0);
  return map;
}

// Runs of parameters for buckets, formed from the end because backward produces the last parameters first; returned
// from the first parameter on. `size(p)` elements of the full space each.
template <typename Size>
std::vector<Bucket> runs_from_the_end(size_t count, int64_t max_numel, const std::vector<bool>& alone, Size size) {
  std::vector<Bucket> runs;
  int64_t held = 0;
  const auto apart = [&](int32_t param) { return !alone.empty() && alone.at(static_cast<size_t>(param)); };
  for (auto param = static_cast<int32_t>(count) - 1; param >= 0; --param) {
    const int64_t more = size(static_cast<size_t>(param));
    if (runs.empty() || held + more > max_numel || apart(param) || apart(param + 1)) {
      runs.push_back({param, param, 0, 0});
      held = more;
    } else {
      runs.back().first_param = param;
      held += more;
    }
  }
  std::reverse(runs.begin(), runs.end());
  return runs;
}

void finish(ShardMap& map, std::vector<Bucket> runs) {
  map.first.assign(map.numels.size() + 1, 0);
  for (const Extent& extent : map.extents) ++map.first[static_cast<size_t>(extent.param) + 1];
  for (size_t param = 0; param < map.numels.size(); ++param) map.first[param + 1] += map.first[param];
  std::reverse(runs.begin(), runs.end());
  map.buckets = std::move(runs);
  for (size_t b = 0; b < map.buckets.size(); ++b)
    for (int32_t param = map.buckets[b].first_param; param <= map.buckets[b].last_param; ++param)
      map.bucket_of[param] = static_cast<int32_t>(b);
}

}  // namespace

ShardMap flat_shards(const std::vector<int64_t>& numels, int64_t align, int64_t parts, int64_t max_numel,
                     const std::vector<bool>& alone) {
  ShardMap map = checked(numels, align, parts, max_numel);
  auto runs = runs_from_the_end(numels.size(), max_numel, alone, [&](size_t p) { return round_up(numels[p], align); });
  for (Bucket& run : runs) {
    const int64_t begin = map.full_numel();
    int64_t next = begin;
    for (int32_t param = run.first_param; param <= run.last_param; ++param) {
      map.offsets[param] = next;
      next = round_up(next + numels[param], align);
    }
    const int64_t row = round_up(next - begin, align * parts) / parts;
    run.shard_begin = map.shard_numel;
    run.shard_end = map.shard_numel += row;
    for (int32_t param = run.first_param; param <= run.last_param; ++param) {
      const int64_t start = map.offsets[param], end = start + numels[param];
      for (int64_t at = start; at < end;) {
        const int64_t rank = (at - begin) / row;
        const int64_t stop = std::min(end, begin + (rank + 1) * row);
        map.extents.push_back(
            {param, at - start, stop - at, static_cast<int32_t>(rank), run.shard_begin + at - begin - rank * row, at});
        at = stop;
      }
    }
  }
  finish(map, std::move(runs));
  return map;
}

int64_t slice_numel(int64_t numel, int64_t parts) { return numel / parts + (numel % parts != 0 ? 1 : 0); }

ShardMap param_shards(const std::vector<int64_t>& numels, int64_t align, int64_t parts, int64_t max_numel) {
  ShardMap map = checked(numels, align, parts, max_numel);
  const auto room = [&](size_t p) { return round_up(slice_numel(numels[p], parts), align); };
  auto runs = runs_from_the_end(numels.size(), max_numel, {}, [&](size_t p) { return parts * room(p); });
  for (Bucket& run : runs) {
    run.shard_begin = run.shard_end = map.shard_numel;
    for (int32_t param = run.first_param; param <= run.last_param; ++param) run.shard_end += room(param);
    int64_t next = run.shard_begin;
    for (int32_t param = run.first_param; param <= run.last_param; ++param) {
      const int64_t slice = slice_numel(numels[param], parts);
      for (int64_t rank = 0; rank * slice < numels[param]; ++rank)
        map.extents.push_back({param, rank * slice, std::min(slice, numels[param] - rank * slice),
                               static_cast<int32_t>(rank), next, map.full_offset(run, rank, next)});
      next += room(param);
    }
    map.shard_numel = run.shard_end;
  }
  finish(map, std::move(runs));
  return map;
}

}  // namespace ds::plan
