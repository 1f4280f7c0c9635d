#include "comm/boards/board.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <utility>

#include "base/ranges.h"

namespace ds::comm {

namespace {

constexpr size_t kMostRanks = 16;  // the ranks that a message describes one by one

std::string indented(const std::string& text) {
  std::string made;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    made += "\n    " + text.substr(begin, end - begin);
    begin = end + 1;
  }
  return made;
}

std::string trace_folder() {
  for (const char* variable : {"DS_COMM_TRACE_DIR", "TMPDIR"})
    if (const char* folder = std::getenv(variable); folder && *folder) return folder;
  return "/tmp";
}

}  // namespace

std::string seconds_text(int64_t us) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", static_cast<double>(us) * 1e-6);
  return text;
}

Board::Board(int rank, const GroupFacts& facts)
    : rank_(rank), job_rank_(facts.job_rank), name_(facts.name), folder_(trace_folder()) {}

namespace {

std::string different_calls(std::string text, const std::vector<RankCall>& calls, int64_t number) {
  for (const RankCall& each : calls) text += " rank " + std::to_string(each.rank) + " " + describe(each.call) + ";";
  text.back() = '.';
  return text + " (Number " + std::to_string(number) + " of this group.)";
}

}  // namespace

std::string mismatch(const std::vector<RankCall>& calls, const Record& mine, int64_t number) {
  if (all_of(calls, [&](const RankCall& each) { return fits(each.call, mine); })) return "";
  return different_calls("the ranks of a group call different collectives:", calls, number);
}

std::string unbalanced(const std::vector<RankCall>& calls, int64_t number) {
  std::vector<Record> records;
  for (const RankCall& each : calls) records.push_back(each.call);
  if (gives_what_is_taken(records)) return "";
  return different_calls("a rank gives another one more or less than that one takes from it (split sizes):", calls,
                         number);
}

const Flight* oldest_open(const std::vector<Flight>& flights) {
  const auto found = find_if(flights, [](const Flight& each) { return !each.end_us; });
  return found == flights.end() ? nullptr : &*found;
}

std::string status_of(const std::vector<Flight>& flights) {
  if (flights.empty()) return "has not entered any collective of this group";
  const Flight* const open = oldest_open(flights);
  const Flight& last = open ? *open : flights.back();
  const std::string what = describe(last.call) + ", number " + std::to_string(last.number);
  const int64_t now = now_us();
  if (open) return "in " + what + ", for " + seconds_text(now - last.begin_us);
  return "outside of collectives; " + what + ", its last, ended " + seconds_text(now - last.end_us) + " ago";
}

void Board::warn(const std::string& text) {
  std::lock_guard lock(mutex_);
  warnings_.push_back(name_.empty() ? text : "group " + name_ + ": " + text);
  has_warnings_ = true;
}

void Board::look(const DiagnosticCallbacks& callbacks) {
  if (!has_warnings_.exchange(false)) return;
  std::vector<std::string> texts;
  {
    std::lock_guard lock(mutex_);
    texts = std::exchange(warnings_, {});
  }
  for (const std::string& text : texts)
    if (callbacks.warn) callbacks.warn(text);
}

std::string Board::write_flights(const std::string& why, const std::vector<RankView>& ranks) const {
  const std::string path = folder_ + "/deepspeed-comm-rank" + std::to_string(job_rank_ >= 0 ? job_rank_ : rank_) + "-" +
                           std::to_string(getpid()) + "-" + std::to_string(now_us()) + ".json";
  std::ofstream file(path);
  file << "{\"group\": " << json_text(name_) << ", \"rank\": " << rank_ << ", \"why\": " << json_text(why)
       << ", \"ranks\": [";
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const RankView& each = ranks[rank];
    file << (rank ? ",\n" : "\n") << "{\"rank\": " << rank << ", \"job_rank\": " << each.job_rank
         << ", \"process\": " << each.pid << ", \"place\": " << json_text(each.status)
         << ", \"stack\": " << json_text(each.stack) << ", \"flights\": " << to_json(each.flights) << "}";
  }
  file << "]}\n";
  file.close();
  if (file) return "The last collectives of all ranks are in " + path;
  return "The last collectives of all ranks could not be written to " + path + " (" + std::strerror(errno) +
         "; DS_COMM_TRACE_DIR names another folder)";
}

std::string Board::report(const std::string& why) {
  const std::vector<RankView> ranks = views();
  std::map<std::string, size_t> first_with;  // stacks that several ranks share are shown once
  std::string text = "\nWhere the ranks are:";
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (rank >= kMostRanks) {
      text += "\n  ... and " + std::to_string(ranks.size() - rank) + " more, in the file";
      break;
    }
    text += "\n  " + ranks[rank].called + ": " + ranks[rank].status;
    const std::string& stack = ranks[rank].stack;
    if (stack.empty()) continue;
    const auto [found, fresh] = first_with.emplace(stack, rank);
    text += fresh ? indented(stack) : "\n    (the same as of rank " + std::to_string(found->second) + ")";
  }
  return text + "\n" + write_flights(why, ranks);
}

}  // namespace ds::comm
