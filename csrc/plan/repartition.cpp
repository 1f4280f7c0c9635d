#include "plan/repartition.h"

#include <algorithm>

#include "base/error.h"
#include "base/ranges.h"
#include "base/sizes.h"

namespace ds::plan {

Repartition repartition(const std::vector<OwnedRun>& runs, int64_t size, int32_t parts, int32_t rank) {
  std::vector<std::vector<Give>> to(parts);
  std::vector<std::vector<Take>> from(parts);
  Repartition made;
  made.give_numels.assign(parts, 0);
  made.take_numels.assign(parts, 0);
  const int64_t room = sizes::product("elements of all partitions", size, int64_t{parts});
  for (const OwnedRun& run : runs) {
    const int64_t stop = sizes::sum("elements of a run", run.at, run.numel);
    if (run.numel > 0 && (run.at < 0 || stop > room || run.rank < 0 || run.rank >= parts))
      fail(ErrorKind::kValue, "elements ", run.at, " to ", stop, " do not fit into ", parts, " partitions of ", size);
    for (int64_t at = run.at, end = run.at + run.numel; at < end;) {
      const int64_t part = at / size, stop = std::min(end, (part + 1) * size);
      if (run.rank == rank) {
        to[part].push_back({run.piece, run.offset + at - run.at, stop - at});
        made.give_numels[part] += stop - at;
      }
      if (part == rank) {
        from[run.rank].push_back({at - part * size, stop - at});
        made.take_numels[run.rank] += stop - at;
      }
      at = stop;
    }
  }
  for (const auto& gives : to) append(made.give, gives);
  for (const auto& takes : from) append(made.take, takes);
  return made;
}

}  // namespace ds::plan
