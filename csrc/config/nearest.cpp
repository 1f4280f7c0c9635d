#include "config/nearest.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <sstream>

#include "config/text.h"

namespace ds::config {

namespace {

constexpr size_t kLongestWord = 80;  // no key is longer; keeps hostile input cheap
constexpr size_t kShortWord = 4;     // letters; two edits make another word of it

std::string clipped(const std::string& text) { return lower(text.substr(0, kLongestWord)); }

std::set<std::string> words_of(const std::string& name) {
  std::set<std::string> out;
  std::istringstream parts(clipped(name));
  for (std::string part; std::getline(parts, part, '_');) out.insert(part);
  return out;
}

// "warmup_steps" leaves a word of "warmup_num_steps" out.
bool leaves_words_out(const std::string& word, const std::string& candidate) {
  const std::set<std::string> some = words_of(word), all = words_of(candidate);
  return some.size() > 1 && std::includes(all.begin(), all.end(), some.begin(), some.end());
}

// Whether the two have at least half of the longer one's letters in common, in any order.
bool shares_letters(const std::string& first, const std::string& second) {
  std::string a = clipped(first), b = clipped(second), common;
  std::sort(a.begin(), a.end());
  std::sort(b.begin(), b.end());
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(common));
  return 2 * common.size() >= std::max(a.size(), b.size());
}

}  // namespace

int edit_distance(const std::string& first, const std::string& second) {
  const std::string a = clipped(first), b = clipped(second);
  const size_t n = b.size();
  std::vector<int> before(n + 1), last(n + 1), now(n + 1);
  for (size_t j = 0; j <= n; ++j) last[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    now[0] = static_cast<int>(i);
    for (size_t j = 1; j <= n; ++j) {
      const int replace = last[j - 1] + (a[i - 1] != b[j - 1]);
      now[j] = std::min({replace, last[j] + 1, now[j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) now[j] = std::min(now[j], before[j - 2] + 1);
    }
    std::swap(before, last);
    std::swap(last, now);
  }
  return last[n] + static_cast<int>(std::max(first.size(), kLongestWord) - kLongestWord);
}

std::string nearest(const std::string& word, const std::vector<std::string>& candidates) {
  int best = std::max(2, static_cast<int>(word.size()) / 3) + 1;
  std::string found;
  for (const std::string& candidate : candidates) {
    const int distance = leaves_words_out(word, candidate) ? 1 : edit_distance(word, candidate);
    const bool is_short = std::min(word.size(), candidate.size()) <= kShortWord;
    if (distance > 1 && (is_short || !shares_letters(word, candidate))) continue;
    if (distance < best && distance < static_cast<int>(candidate.size())) {
      best = distance;
      found = candidate;
    }
  }
  if (!found.empty() || word.size() < 4) return found;
  // No near spelling: a shortened or lengthened name ("clipping" for "gradient_clipping").
  const std::string small = clipped(word);
  for (const std::string& candidate : candidates) {
    const std::string other = clipped(candidate);
    const bool inside =
        other.find(small) != std::string::npos || (other.size() >= 4 && small.find(other) != std::string::npos);
    if (inside && (found.empty() || candidate.size() < found.size())) found = candidate;
  }
  return found;
}

bool is_slip(const std::string& word, const std::string& known) {
  const int distance = edit_distance(word, known);
  if (known.size() <= 3) return distance <= 1 && word.size() == known.size();
  return distance <= (known.size() <= 6 ? 1 : 2);
}

}  // namespace ds::config
