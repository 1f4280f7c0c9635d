#include "plan/saved_layout.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "base/ranges.h"
#include "base/sizes.h"
#include "plan/shard_map.h"

namespace ds::plan {
namespace {

// `at` + `numel`, both from files.
int64_t counted(const std::string& origin, int64_t at, int64_t numel) {
  if (numel < 0) fail(ErrorKind::kValue, origin, ": a parameter or a shard of ", numel, " elements");
  return sizes::sum(origin.c_str(), at, numel);
}

}  // namespace

SavedLayout SavedLayout::flat(const std::vector<std::vector<int64_t>>& numels, const std::vector<int64_t>& partitions,
                              int32_t ranks, const std::string& origin) {
  if (numels.size() != partitions.size()) fail(ErrorKind::kValue, origin, ": a partition size for each group");
  SavedLayout made(ranks, false);
  made.partitions_ = partitions;
  for (size_t group = 0; group < numels.size(); ++group) {
    int64_t at = 0;
    int32_t index = 0;
    for (const int64_t numel : numels[group]) {
      made.entries_.push_back({static_cast<int32_t>(group), index++, at, numel});
      at = counted(origin, at, numel);
    }
    const int64_t size = partitions[group];
    const int64_t room = sizes::product("elements of all shards", size, int64_t{ranks});
    if (at > room) {
      fail(ErrorKind::kValue, origin, ": parameter group ", group, " has ", at, " elements, and its ", ranks,
           " shard(s) of ", size, " hold ", room,
           ". The model has other parameters than the one that was saved, or shards are missing; load it with the "
           "model it is of");
    }
  }
  return made;
}

SavedLayout SavedLayout::partitioned(const std::vector<int64_t>& numels, int32_t ranks) {
  const int64_t total = sum_of(numels);
  const int64_t even = 2 * int64_t{ranks};
  return flat({numels}, {(total + even - 1) / even * 2}, ranks, "a parameter group");
}

SavedLayout SavedLayout::sliced(const std::vector<int64_t>& numels, const std::vector<int64_t>& units, int32_t ranks,
                                const std::string& origin) {
  SavedLayout made(ranks, true);
  int64_t at = 0, start = 0;  // in a rank's slices, end to end; where the current unit begins there
  int32_t unit = 0, index = 0;
  for (const int64_t numel : numels) {
    // A unit may be empty, or follow empty slices: a parameter is in the last one that begins where it does.
    while (static_cast<size_t>(unit) + 1 < units.size() && at >= start + units[static_cast<size_t>(unit)]) {
      start += units[static_cast<size_t>(unit++)];
      index = 0;
    }
    made.entries_.push_back({unit, index++, at - start, numel});
    at = counted(origin, at, slice_numel(numel, ranks));
  }
  int64_t held = 0;
  for (const int64_t numel : units) held = counted(origin, held, numel);
  if (!units.empty() && held != at) {
    fail(ErrorKind::kValue, origin, ": a rank's slices of ", numels.size(), " parameters have ", at, " elements when ",
         ranks, " rank(s) share them, and its files hold ", held,
         ": they are of another model or shards are missing; load it with the model it is of");
  }
  return made;
}

SavedLayout SavedLayout::sub_grouped(const std::vector<std::vector<int64_t>>& numels, int64_t most, int32_t ranks) {
  SavedLayout made(ranks, true);
  int32_t unit = -1;
  for (const std::vector<int64_t>& group : numels) {
    int64_t held = -1, at = 0;  // elements of all ranks in the current unit (-1: there is none), and of one rank
    int32_t index = 0;
    for (const int64_t numel : group) {
      if (numel < 0) {
        made.entries_.push_back({-1, 0, 0, 0});
        continue;
      }
      if (held < 0 || held + numel > most) {
        ++unit;
        held = at = 0;
        index = 0;
      }
      made.entries_.push_back({unit, index++, at, numel});
      held += numel;
      at += slice_numel(numel, ranks);
    }
  }
  return made;
}

std::vector<std::vector<int64_t>> SavedLayout::units() const {
  std::vector<std::vector<int64_t>> found;
  for (size_t param = 0; param < entries_.size(); ++param) {
    const int32_t unit = entries_[param].unit;
    if (unit < 0) continue;
    if (found.size() <= static_cast<size_t>(unit)) found.resize(static_cast<size_t>(unit) + 1);
    found[static_cast<size_t>(unit)].push_back(static_cast<int64_t>(param));
  }
  return found;
}

std::vector<SavedRun> SavedLayout::runs(size_t param) const {
  const Entry& entry = entries_.at(param);
  std::vector<SavedRun> found;
  const int64_t slice = is_sliced_ ? slice_numel(entry.numel, ranks_) : 0;
  for (int64_t at = 0; at < entry.numel;) {
    const int64_t size = is_sliced_ ? slice : partitions_[static_cast<size_t>(entry.unit)];
    const int64_t row = is_sliced_ ? at : entry.begin + at;  // position among what all ranks have
    const int64_t rank = row / size, within = row - rank * size;
    const int64_t numel = std::min(entry.numel - at, size - within);
    found.push_back({at, numel, static_cast<int32_t>(rank), is_sliced_ ? entry.begin : within});
    at += numel;
  }
  return found;
}

std::vector<int32_t> writers_of(const std::vector<int64_t>& numels, int32_t count) {
  const int64_t total = sum_of(numels);
  std::vector<int32_t> found;
  found.reserve(numels.size());
  int64_t at = 0;
  for (const int64_t numel : numels) {
    const int64_t middle = 2 * at + numel;  // twice the middle of the tensor, which decides
    const int64_t rank =
        total > 0 ? sizes::product("elements of all writers", middle, int64_t{count}) / (2 * total) : 0;
    found.push_back(static_cast<int32_t>(std::min<int64_t>(count - 1, rank)));
    at += numel;
  }
  return found;
}

}  // namespace ds::plan
