#include "plan/length_plan.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/ranges.h"

namespace ds::plan {

namespace {

using Wide = __int128;
constexpr size_t kSamples = 3;

Wide ceil_div(Wide a, Wide b) { return a >= 0 ? (a + b - 1) / b : -(-a / b); }

}  // namespace

LengthCurve::LengthCurve(std::vector<LengthSample> samples) : samples_(std::move(samples)) {
  if (samples_.size() < kSamples) {
    fail(ErrorKind::kValue, "A curve of memory against length needs three lengths, got ", samples_.size(), ".");
  }
  for (size_t i = 0; i < samples_.size(); ++i) {
    const LengthSample& one = samples_[i];
    if (one.length < 1 || (i > 0 && one.length <= samples_[i - 1].length)) {
      fail(ErrorKind::kValue, "Lengths must rise: ", one.length, " tokens at index ", i, ".");
    }
    check_like_first(one);
  }
}

void LengthCurve::check_like_first(const LengthSample& sample) const {
  const LengthSample& first = samples_.front();
  bool same = !sample.moments.empty() && sample.moments.size() == first.moments.size();
  for (size_t m = 0; same && m < sample.moments.size(); ++m) {
    same = !sample.moments[m].empty() && sample.moments[m].size() == first.moments[0].size();
  }
  if (!same) fail(ErrorKind::kValue, "Samples of ", sample.length, " and ", first.length, " tokens have other parts.");
}

int64_t LengthCurve::at(size_t moment, size_t part, int64_t length) const {
  size_t above = 0;  // samples below `length`, so the first that is not
  while (above < samples_.size() && samples_[above].length < length) ++above;
  const size_t last = samples_.size() - kSamples, from = std::min(above > 1 ? above - 2 : 0, last);
  return std::max(through(from, moment, part, length),
                  through(std::min(from + (above > 1), last), moment, part, length));
}

// Newton's form of the polynomial through three samples, over one denominator, rounded up once.
int64_t LengthCurve::through(size_t from, size_t moment, size_t part, int64_t length) const {
  const LengthSample *s0 = &samples_[from], *s1 = s0 + 1, *s2 = s0 + 2;
  const Wide n0 = s0->length, n1 = s1->length, n2 = s2->length, n = length;
  const auto bytes = [&](size_t i) { return static_cast<Wide>(samples_[from + i].moments[moment][part]); };
  const Wide rise1 = bytes(1) - bytes(0), rise2 = bytes(2) - bytes(1);
  // The steps without their common factor, so that lengths far away do not overflow.
  const int64_t common = std::gcd(s1->length - s0->length, s2->length - s1->length);
  const Wide step1 = (n1 - n0) / common, step2 = (n2 - n1) / common, both = step1 + step2;
  // bytes(0) + (n - n0) rise1 / step1 + (n - n0)(n - n1)(rise2 / step2 - rise1 / step1) / (n2 - n0)
  const Wide bend = rise2 * step1 - rise1 * step2, under = step1 * step2 * both * common * common;
  const Wide over = (n - n0) * (rise1 * step2 * both * common + (n - n1) * bend);
  const Wide value = bytes(0) + ceil_div(over, under);
  return static_cast<int64_t>(std::clamp<Wide>(value, 0, std::numeric_limits<int64_t>::max() / 64));
}

int64_t LengthCurve::moment(int64_t length) const {
  int64_t best = 0, most = -1;
  for (size_t m = 0; m < samples_[0].moments.size(); ++m) {
    int64_t total = 0;
    for (size_t part = 0; part < samples_[0].moments[m].size(); ++part) total += at(m, part, length);
    if (total > most) {
      most = total;
      best = static_cast<int64_t>(m);
    }
  }
  return best;
}

std::vector<int64_t> LengthCurve::parts(int64_t length) const {
  const auto largest = static_cast<size_t>(moment(length));
  std::vector<int64_t> found;
  for (size_t part = 0; part < samples_[0].moments[largest].size(); ++part) found.push_back(at(largest, part, length));
  return found;
}

int64_t LengthCurve::peak(int64_t length) const {
  int64_t total = 0;
  for (const int64_t bytes : parts(length)) total += bytes;
  return total;
}

int64_t LengthCurve::miss(const LengthSample& found) const {
  check_like_first(found);
  int64_t most = 0;
  for (const std::vector<int64_t>& parts : found.moments) {
    most = std::max(most, sum_of(parts));
  }
  const Wide off = static_cast<Wide>(peak(found.length)) - most;
  return static_cast<int64_t>(ceil_div((off < 0 ? -off : off) * 1000, std::max<int64_t>(most, 1)));
}

int64_t LengthCurve::longest(int64_t memory, int64_t step, int64_t limit) const {
  if (step < 1) fail(ErrorKind::kValue, "A length is a multiple of 1 or more, got ", step, ".");
  int64_t low = 0, high = limit / step;  // steps that fit; the most there may be
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    if (peak(middle * step) <= memory) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low * step;
}

int64_t cheapest_step(const std::vector<int64_t>& longest, int64_t now, int64_t gain_percent) {
  for (size_t i = 0; i < longest.size(); ++i) {
    const Wide wanted = static_cast<Wide>(now) * (100 + gain_percent);
    if (longest[i] > now && static_cast<Wide>(longest[i]) * 100 >= wanted) return static_cast<int64_t>(i);
  }
  return -1;
}

}  // namespace ds::plan
