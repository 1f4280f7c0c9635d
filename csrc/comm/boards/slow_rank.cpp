#include "comm/boards/slow_rank.h"

#include <algorithm>
#include <cstdio>

#include "base/ranges.h"

namespace ds::comm {

std::string SlowRank::note(const std::vector<int64_t>& came_us) {
  int last = 0;
  int64_t before = 0;  // the latest of the others
  for (size_t rank = 1; rank < came_us.size(); ++rank)
    if (came_us[rank] > came_us[last]) last = static_cast<int>(rank);
  for (size_t rank = 0; rank < came_us.size(); ++rank)
    if (static_cast<int>(rank) != last) before = std::max(before, came_us[rank]);
  const int64_t now = came_us[last];
  if (since_us_ == 0) {  // time before the first collective counts for no rank
    since_us_ = now;
    return "";
  }
  waited_us_[last] += now - std::max(before, since_us_);
  ++count_;
  const int64_t window = now - since_us_;
  if (window < kWindowUs || count_ < kFewest) return "";
  std::string text;
  const auto worst = std::max_element(waited_us_.begin(), waited_us_.end());
  const auto rank = static_cast<size_t>(worst - waited_us_.begin());
  if (*worst * 2 > window && !reported_[rank]) {
    reported_[rank] = true;
    char line[256];
    std::snprintf(
        line, sizeof(line),
        "rank %zu is slow: in the last %.1f s, with %d collectives, all other ranks have waited %.1f s for it "
        "alone (%.0f %% of the time). It is waited for; this is said once.",
        rank, static_cast<double>(window) * 1e-6, count_, static_cast<double>(*worst) * 1e-6,
        100.0 * static_cast<double>(*worst) / static_cast<double>(window));
    text = line;
  }
  fill(waited_us_, 0);
  since_us_ = now;
  count_ = 0;
  return text;
}

}  // namespace ds::comm
