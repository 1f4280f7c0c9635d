#include "comm/boards/call_figures.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/ranges.h"

namespace ds::comm {

namespace {

constexpr size_t kColumn = 20;

// The data of an operation as a multiple of the bytes that one rank passes; 0: once for each rank; -1: it moves its
// tensor once, and all of it.
int passes(const std::string& name) {
  static const std::map<std::string, int> known = {
      {"all_reduce", 2},
      {"inference_all_reduce", 2},
      {"all_reduce_coalesced", 2},
      {"all_gather", 0},
      {"all_gather_into_tensor", 0},
      {"all_gather_coalesced", 0},
      {"allgather_fn", 0},
      {"gather", 0},
      {"scatter", 0},
      {"reduce_scatter", 1},
      {"reduce_scatter_tensor", 1},
      {"reduce_scatter_fn", 1},
      {"all_to_all", 1},
      {"all_to_all_single", 1},
  };
  const auto found = known.find(name);
  return found == known.end() ? -1 : found->second;
}

std::string fixed(double value) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.2f", value);
  return text;
}

std::string row(const std::vector<std::string>& cells) {
  std::string made;
  for (const std::string& cell : cells)
    made += cell + std::string(cell.size() < kColumn ? kColumn - cell.size() : 0, ' ');
  return made.substr(0, made.find_last_not_of(' ') + 1);
}

}  // namespace

std::pair<double, double> bandwidths(const std::string& name, double bytes, double ms, int ranks) {
  if (ms <= 0 || bytes <= 0) return {0.0, 0.0};
  const int times = passes(name);
  const double data = bytes * (times == 0 ? ranks : std::abs(times));
  const double algorithm = data * 8 / (ms * 1e-3) / 1e9;
  return {algorithm, times < 0 ? algorithm : algorithm * (ranks - 1) / ranks};
}

std::string readable_size(double bytes) {
  constexpr const char* kUnits[] = {"B", "KB", "MB", "GB", "TB", "PB"};
  size_t unit = 0;
  for (; bytes >= 1024 && unit + 1 < std::size(kUnits); ++unit) bytes /= 1024;
  char text[64];
  std::snprintf(text, sizeof(text), "%g %s", std::round(bytes * 100) / 100, kUnits[unit]);
  return text;
}

double trimmed_mean(Times values, double share) {
  if (values.empty()) return 0.0;
  sort(values);
  auto cut = static_cast<size_t>(static_cast<double>(values.size()) * share);
  if (2 * cut >= values.size()) cut = 0;
  const Times kept(values.begin() + static_cast<int64_t>(cut), values.end() - static_cast<int64_t>(cut));
  return sum_of(kept) / static_cast<double>(kept.size());
}

CallFigures::CallFigures(const CallEntry& entry)
    : count(std::get<0>(entry)),
      total_ms(sum_of(std::get<1>(entry))),
      average_ms(trimmed_mean(std::get<1>(entry))),
      algorithm(trimmed_mean(std::get<2>(entry))),
      bus(trimmed_mean(std::get<3>(entry))) {}

Stragglers stragglers(const CallTotals& mine, const std::vector<TimesByCall>& everybody) {
  Stragglers found;
  for (const auto& [name, sizes] : mine) {
    std::map<int64_t, Straggler> by_size;
    for (const auto& [bytes, entry] : sizes) {
      const Times& times = std::get<1>(entry);
      Times waited = times, shortest = times;
      int64_t ranks = 0;
      for (const TimesByCall& theirs : everybody) {
        const auto call = theirs.find(name);
        if (call == theirs.end()) continue;
        const auto size = call->second.find(bytes);
        if (size == call->second.end() || size->second.size() != times.size()) continue;
        ++ranks;
        for (size_t i = 0; i < times.size(); ++i) shortest[i] = std::min(shortest[i], size->second[i]);
      }
      for (size_t i = 0; i < times.size(); ++i) waited[i] = times[i] - shortest[i];
      by_size[bytes] = {static_cast<int64_t>(times.size()),
                        ranks,
                        sum_of(times),
                        sum_of(waited),
                        trimmed_mean(times),
                        trimmed_mean(waited)};
    }
    found.emplace_back(name, std::move(by_size));
  }
  return found;
}

std::string call_table(const CallTotals& log, const std::optional<Stragglers>& stragglers) {
  std::string text = "\n" + row({"Comm. Op", "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)",
                                 "tput_avg (Gbps)", "busbw_avg (Gbps)"});
  for (const auto& [name, sizes] : log) {
    text += "\n" + name;
    for (const auto& [bytes, entry] : sizes) {
      const CallFigures each(entry);
      text += "\n" + row({"", readable_size(static_cast<double>(bytes)), std::to_string(each.count),
                          fixed(each.total_ms), fixed(each.average_ms), fixed(each.algorithm), fixed(each.bus)});
    }
  }
  if (!stragglers) return text;
  text += "\n\n" + row({"Comm. Op", "Message Size", "Count", "Total comm lat(ms)", "Total straggler(ms)",
                        "Avg comm lat(ms)", "Avg straggler(ms)"});
  for (const auto& [name, sizes] : *stragglers) {
    text += "\n" + name;
    for (const auto& [bytes, each] : sizes)
      text +=
          "\n" + row({"", readable_size(static_cast<double>(bytes)), std::to_string(each.count), fixed(each.total_ms),
                      fixed(each.total_waited_ms), fixed(each.average_ms), fixed(each.average_waited_ms)});
  }
  return text;
}

}  // namespace ds::comm
