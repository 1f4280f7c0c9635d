#include "comm/rank_board.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <thread>
#include <utility>

#include "base/process.h"

namespace ds::comm {

namespace {

constexpr std::chrono::milliseconds kAnswer(2000);  // how long ranks have to say where they are
constexpr size_t kMostRanks = 16;                   // whose places a message describes one by one

enum : uint32_t { kNobody, kSomebody, kLeft };  // who answers for a rank

std::string seconds(int64_t us) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", static_cast<double>(us) * 1e-6);
  return text;
}

std::string indented(const std::string& text) {
  std::string made;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    made += "\n    " + text.substr(begin, end - begin);
    begin = end + 1;
  }
  return made;
}

}  // namespace

struct RankBoard::Page {
  std::atomic<int32_t> job_rank;
  std::atomic<uint32_t> watched;   // who answers here
  std::atomic<uint32_t> asked;     // somebody wants to know
  std::atomic<uint32_t> answered;  // the stack is there
  FlightRing ring;
  char stack[12 * 1024];
};

RankBoard::RankBoard(int rank, std::shared_ptr<SharedSegments> segments, int64_t place, const GroupFacts& facts)
    : rank_(rank), segments_(std::move(segments)), place_(place), name_(facts.name) {
  static_assert(sizeof(Page) <= kBytes);
  // Not the watch itself: it holds on to boards while it looks at them.
  page(rank_)->job_rank = facts.job_rank;
  page(rank_)->watched = facts.watch ? kSomebody : kNobody;
}

RankBoard::Page* RankBoard::page(int rank) const {
  return reinterpret_cast<Page*>(static_cast<char*>(segments_->data(rank)) + place_);
}

FlightRing& RankBoard::ring() { return page(rank_)->ring; }

std::vector<Flight> RankBoard::flights() const { return page(rank_)->ring.read(); }

std::string RankBoard::called(int rank) const {
  const int32_t job_rank = page(rank)->job_rank;
  return "rank " + std::to_string(rank) + " (" +
         (job_rank >= 0 && job_rank != rank ? "rank " + std::to_string(job_rank) + " of the job, " : "") + "process " +
         std::to_string(segments_->pid(rank)) + ")";
}

void RankBoard::close() { page(rank_)->watched = kLeft; }

void RankBoard::warn(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex_);
  warnings_.push_back(name_.empty() ? text : "group " + name_ + ": " + text);
  has_warnings_ = true;
}

void RankBoard::look(const DiagnosticCallbacks& callbacks) {
  if (has_warnings_.exchange(false)) {
    std::vector<std::string> texts;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      texts = std::exchange(warnings_, {});
    }
    for (const std::string& text : texts)
      if (callbacks.warn) callbacks.warn(text);
  }
  Page* mine = page(rank_);
  if (!mine->asked.load(std::memory_order_acquire) || mine->answered.load(std::memory_order_relaxed)) return;
  if (segments_->pid(rank_) != getpid()) return;  // a forked child does not answer for its parent
  const std::string text = callbacks.stacks ? callbacks.stacks() : "";
  std::strncpy(mine->stack, text.c_str(), sizeof(mine->stack) - 1);
  mine->answered.store(1, std::memory_order_release);
}

std::string RankBoard::place_of(int rank) const {
  const std::vector<Flight> flights = page(rank)->ring.read();
  if (flights.empty()) return "has not entered any collective of this group";
  const Flight& last = flights.back();
  const std::string what = describe(last.call) + ", number " + std::to_string(last.number);
  const int64_t now = now_us();
  if (!last.end_us) return "in " + what + ", for " + seconds(now - last.begin_us);
  return "outside of collectives; " + what + ", its last, ended " + seconds(now - last.end_us) + " ago";
}

std::string RankBoard::stack_of(int rank) const {
  const Page* theirs = page(rank);
  if (theirs->answered.load(std::memory_order_acquire)) {
    if (theirs->stack[0]) return std::string(theirs->stack, strnlen(theirs->stack, sizeof(theirs->stack)));
    return "(its stack is not known: no interpreter answers there)";
  }
  const char state = segments_->alive(rank) ? process_state(segments_->pid(rank)) : 'Z';
  if (state == 'Z' || state == 'X') return "(it has ended: there is no stack)";
  if (state == 'T' || state == 't') return "(its process is stopped, by a signal or a debugger: no stack)";
  if (theirs->watched == kLeft) return "(it has left the group)";
  if (theirs->watched == kNobody) return "(its stack is not known: nobody watches over that group there)";
  return std::string("(it does not answer: its interpreter is busy in a call that does not return, ") +
         (state == 'R'   ? "computing"
          : state == 'D' ? "waiting for a device or a disk"
                         : "waiting") +
         "; `py-spy dump --native --pid " + std::to_string(segments_->pid(rank)) + "` would show where)";
}

std::string RankBoard::write_flights(const std::string& why) const {
  const char* folder = std::getenv("DS_COMM_TRACE_DIR");
  if (!folder || !*folder) folder = std::getenv("TMPDIR");
  if (!folder || !*folder) folder = "/tmp";
  const int32_t job_rank = page(rank_)->job_rank;
  const std::string path = std::string(folder) + "/deepspeed-comm-rank" +
                           std::to_string(job_rank >= 0 ? job_rank : rank_) + "-" +
                           std::to_string(segments_->pid(rank_)) + "-" + std::to_string(now_us()) + ".json";
  std::ofstream file(path);
  file << "{\"group\": " << json_text(name_) << ", \"rank\": " << rank_ << ", \"why\": " << json_text(why)
       << ", \"ranks\": [";
  for (int rank = 0; rank < segments_->size(); ++rank) {
    const Page* theirs = page(rank);
    file << (rank ? ",\n" : "\n") << "{\"rank\": " << rank << ", \"job_rank\": " << theirs->job_rank
         << ", \"process\": " << segments_->pid(rank) << ", \"place\": " << json_text(place_of(rank))
         << ", \"stack\": " << json_text(stack_of(rank)) << ", \"flights\": " << to_json(theirs->ring.read()) << "}";
  }
  file << "]}\n";
  file.close();
  if (file) return "The last collectives of all ranks are in " + path;
  return "The last collectives of all ranks could not be written to " + path + " (" + std::strerror(errno) +
         "; DS_COMM_TRACE_DIR names another folder)";
}

std::string RankBoard::report(const std::string& why) {
  const int size = segments_->size();
  std::vector<std::string> places;  // taken before anybody moves on
  for (int rank = 0; rank < size; ++rank) {
    places.push_back(place_of(rank));
    page(rank)->asked.store(1, std::memory_order_release);
  }
  const auto deadline = std::chrono::steady_clock::now() + kAnswer;
  const auto silent = [&] {
    for (int rank = 0; rank < size; ++rank)
      if (page(rank)->watched == kSomebody && !page(rank)->answered.load(std::memory_order_acquire) &&
          segments_->alive(rank))
        return true;
    return false;
  };
  while (silent() && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));

  std::map<std::string, int> first_with;  // stacks that several ranks share are shown once
  std::string text = "\nWhere the ranks are:";
  for (int rank = 0; rank < size; ++rank) {
    if (static_cast<size_t>(rank) >= kMostRanks) {
      text += "\n  ... and " + std::to_string(size - rank) + " more, in the file";
      break;
    }
    text += "\n  " + called(rank) + ": " + places[rank];
    const std::string stack = stack_of(rank);
    const auto [found, fresh] = first_with.emplace(stack, rank);
    text += fresh ? indented(stack) : "\n    (the same as of rank " + std::to_string(found->second) + ")";
  }
  return text + "\n" + write_flights(why);
}

}  // namespace ds::comm
