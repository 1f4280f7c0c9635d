// Figures that the log of operations gives: their bandwidths, and the time that ranks waited for others.
//
// Algorithm bandwidth is the data of an operation over its time; for an all-reduce the data is twice its tensor, which
// any algorithm has to read and write. Bus bandwidth corrects it by the share that has to leave a rank, (n-1)/n of
// n ranks, so that it can be compared with what the hardware is said to do, whatever n is. Source of the corrections:
// the description of performance in NVIDIA's nccl-tests. Both in Gbit/s (10^9 bit).
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace ds::comm {

// (algorithm, bus). `bytes`: of the tensor (or list) that a rank passes in: its own part for gathers, the part that it
// receives for a scatter, the whole for the others. Zeros without data or without time.
std::pair<double, double> bandwidths(const std::string& name, double bytes, double ms, int ranks);
std::string readable_size(double bytes);  // 1.5 MB; units of 1024
// The mean without the smallest and the largest `share` of the values: one hiccup is not the speed.
double trimmed_mean(std::vector<double> values, double share = 0.1);

using Times = std::vector<double>;
using CallEntry = std::tuple<int64_t, Times, Times, Times>;  // count, ms, algorithm bandwidths, bus bandwidths
using CallSizes = std::map<int64_t, CallEntry>;              // by bytes
using CallTotals = std::vector<std::pair<std::string, CallSizes>>;

struct CallFigures {
  explicit CallFigures(const CallEntry& entry);
  int64_t count;
  double total_ms, average_ms, algorithm, bus;
};

// The time that this rank was in an operation beyond the rank that was in it for the shortest time. That rank came
// last, and the others waited for it.
struct Straggler {
  int64_t count, ranks;  // compared: those that have seen the operation as often as this rank
  double total_ms, total_waited_ms, average_ms, average_waited_ms;
};
using Stragglers = std::vector<std::pair<std::string, std::map<int64_t, Straggler>>>;
using TimesByCall = std::map<std::string, std::map<int64_t, Times>>;
Stragglers stragglers(const CallTotals& mine, const std::vector<TimesByCall>& everybody);

// With the averages of the trimmed means, and below it the stragglers where they are known.
std::string call_table(const CallTotals& log, const std::optional<Stragglers>& stragglers);

}  // namespace ds::comm
