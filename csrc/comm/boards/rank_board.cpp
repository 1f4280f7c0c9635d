#include "comm/boards/rank_board.h"

#include <unistd.h>

#include <cstring>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/process.h"

namespace ds::comm {

namespace {

enum : uint32_t { kNobody, kSomebody, kLeft };  // whether a watch answers for a rank

}  // namespace

struct RankBoard::Page {
  std::atomic<int32_t> job_rank;
  std::atomic<uint32_t> watched;   // kNobody, kSomebody or kLeft
  std::atomic<uint32_t> asked;     // another rank asks for the stack
  std::atomic<uint32_t> answered;  // the stack is there
  FlightRing ring;
  char stack[12 * 1024];
};

RankBoard::RankBoard(int rank, std::shared_ptr<SharedSegments> segments, int64_t offset, const GroupFacts& facts)
    : Board(rank, facts), segments_(std::move(segments)), offset_(offset) {
  static_assert(sizeof(Page) <= kBytes);
  // Facts, not the watch itself, which holds boards while it looks at them.
  page(rank_)->job_rank = facts.job_rank;
  page(rank_)->watched = facts.watch ? kSomebody : kNobody;
}

RankBoard::Page* RankBoard::page(int rank) const {
  return reinterpret_cast<Page*>(static_cast<char*>(segments_->data(rank)) + offset_);
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

void RankBoard::look(const DiagnosticCallbacks& callbacks) {
  Board::look(callbacks);
  Page* mine = page(rank_);
  if (!mine->asked.load(std::memory_order_acquire) || mine->answered.load(std::memory_order_relaxed)) return;
  if (segments_->pid(rank_) != getpid()) return;  // a forked child does not answer for its parent
  const std::string text = callbacks.stacks ? callbacks.stacks() : "";
  std::strncpy(mine->stack, text.c_str(), sizeof(mine->stack) - 1);
  mine->answered.store(1, std::memory_order_release);
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

std::vector<RankView> RankBoard::views() {
  const int size = segments_->size();
  std::vector<RankView> found(size);
  for (int rank = 0; rank < size; ++rank) {  // statuses are taken before any rank moves on
    RankView& each = found[rank];
    each.called = called(rank);
    each.status = status_of(page(rank)->ring.read());
    each.job_rank = page(rank)->job_rank;
    each.pid = segments_->pid(rank);
    page(rank)->asked.store(1, std::memory_order_release);
  }
  const auto deadline = Clock::now() + kAnswer;
  const auto silent = [&] {
    for (int rank = 0; rank < size; ++rank)
      if (page(rank)->watched == kSomebody && !page(rank)->answered.load(std::memory_order_acquire) &&
          segments_->alive(rank))
        return true;
    return false;
  };
  while (silent() && Clock::now() < deadline) std::this_thread::sleep_for(milliseconds(5));
  for (int rank = 0; rank < size; ++rank) {
    found[rank].stack = stack_of(rank);
    found[rank].flights = page(rank)->ring.read();
  }
  return found;
}

}  // namespace ds::comm
