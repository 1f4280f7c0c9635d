#include "comm/shared_memory/shm_channel.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <new>

#include "base/clock.h"
#include "base/cores.h"
#include "base/error.h"

namespace ds::comm {

namespace {

// Rank 0 tells the user when it has waited this long, and goes on waiting.
constexpr std::chrono::seconds kWorthALine(10);

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

// Waits until somebody wakes sleepers of the word, it has changed, or 200 ms have gone.
void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
  const timespec limit = {0, 200 * 1000 * 1000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool fingerprints_wanted() {
  const char* given = std::getenv("DS_COMM_FINGERPRINTS");
  return !given || std::string(given) != "0";
}

}  // namespace

struct ShmChannel::Line {
  alignas(64) std::atomic<uint32_t> met;  // barriers that this rank has gone into
  alignas(64) std::atomic<uint32_t> sleepers;
  std::atomic<uint32_t> closed, failed, crowded;
  // Used in rank 0's: arrivals at barriers, of all ranks together; barriers at which all have arrived, and ranks that
  // sleep.
  alignas(64) std::atomic<uint32_t> arrivals;
  alignas(64) std::atomic<uint32_t> round;
  std::atomic<uint32_t> round_sleepers;
  std::atomic<int64_t> entered;
  alignas(64) Record records[2];
  char why[1024];
};

ShmChannel::ShmChannel(int rank, std::shared_ptr<SharedSegments> segments, milliseconds timeout, GroupFacts facts)
    : rank_(rank),
      segments_(std::move(segments)),
      board_(std::make_shared<RankBoard>(rank, segments_, 4096, facts)),
      watch_(facts.watch),
      timeout_(timeout),
      checks_(fingerprints_wanted()),
      // About 40 ns each: a rank that is about to come is worth waiting for, one that has no core is not.
      spins_(segments_->size() <= usable_cores() ? 2000 : 20),
      slow_(rank == 0 && segments_->size() > 1 ? std::make_unique<SlowRank>(segments_->size()) : nullptr),
      came_us_(segments_->size()),
      overdue_(segments_->size()) {
  static_assert(sizeof(Line) <= 4096 && std::atomic<uint32_t>::is_always_lock_free);
  new (line(rank_)) Line();
  line(rank_)->crowded = segments_->size() > usable_cores() ? 1 : 0;
  if (watch_) watch_->add(board_);
}

ShmChannel::~ShmChannel() {
  if (segments_->pid(rank_) != getpid()) return;  // a forked child has no say
  board_->close();
  line(rank_)->closed = 1;
  wake_all(line(rank_)->met);
  wake_all(line(0)->round);
}

ShmChannel::Line* ShmChannel::line(int rank) const { return static_cast<Line*>(segments_->data(rank)); }

const Record& ShmChannel::record_of(int rank) const { return line(rank)->records[entered_ & 1]; }

void ShmChannel::refuse_if_failed() const {
  const Line* mine = line(rank_);
  if (mine->failed.load())
    fail(ErrorKind::kRuntime, "this group has failed before: ", static_cast<const char*>(mine->why));
}

void ShmChannel::enter(Record record, const std::function<std::string()>& which) {
  refuse_if_failed();
  Line* mine = line(rank_);
  if (checks_) record.at_us = now_us();
  const int64_t number = ++entered_;
  mine->records[number & 1] = record;
  if (checks_) board_->ring().begin(record, number);
  mine->entered.store(number, std::memory_order_release);
  barrier();
  if (!checks_) return;
  bool meet = true;
  uint64_t surplus = 0;
  for (int rank = 0; rank < segments_->size(); ++rank) {
    const Record& theirs = record_of(rank);
    meet = meet && fits(theirs, record);
    surplus += theirs.given - theirs.taken;
  }
  if (!meet || surplus != 0) {
    std::vector<RankCall> calls;
    for (int rank = 0; rank < segments_->size(); ++rank) calls.push_back({rank, record_of(rank)});
    give_up(!meet ? mismatch(calls, record, number) : unbalanced(calls, number) + (which ? which() : ""));
  }
  if (slow_) note_arrivals();
}

void ShmChannel::leave() {
  if (checks_) board_->ring().end(entered_);
}

void ShmChannel::note_arrivals() {
  for (int rank = 0; rank < segments_->size(); ++rank) came_us_[rank] = record_of(rank).at_us;
  const std::string text = slow_->note(came_us_);
  if (!text.empty()) board_->warn(text);
}

void ShmChannel::barrier() {
  if (met_++ == 0)  // by now all have made their lines
    for (int rank = 0; rank < segments_->size(); ++rank) crowded_ = crowded_ || line(rank)->crowded.load() != 0;
  Line* mine = line(rank_);
  mine->met.store(met_, std::memory_order_seq_cst);
  if (crowded_) return wait_for_last(met_);
  if (mine->sleepers.load(std::memory_order_seq_cst) != 0) wake_all(mine->met);
  for (int step = 1; step < segments_->size(); ++step) wait_for((rank_ + step) % segments_->size(), met_);
}

bool ShmChannel::is_here(int rank, uint32_t count) const {
  return static_cast<int32_t>(line(rank)->met.load(std::memory_order_acquire) - count) >= 0;
}

void ShmChannel::wait_for(int rank, uint32_t count) {
  for (int spin = 0; spin < spins_; ++spin) {
    if (is_here(rank, count)) return;
    pause_briefly();
  }
  Line* theirs = line(rank);
  const Clock::time_point since = Clock::now();
  while (!is_here(rank, count)) {
    theirs->sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = theirs->met.load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(seen - count) < 0) sleep_on(theirs->met, seen);
    theirs->sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (!is_here(rank, count)) still_missing(rank, since);
  }
}

// Nobody goes into barrier `count` + 1 before all have gone into `count`: so the arrivals say who is the last.
void ShmChannel::wait_for_last(uint32_t count) {
  Line* shared = line(0);
  const auto ranks = static_cast<uint32_t>(segments_->size());
  if (shared->arrivals.fetch_add(1, std::memory_order_acq_rel) + 1 == count * ranks) {
    shared->round.store(count, std::memory_order_seq_cst);
    if (shared->round_sleepers.load(std::memory_order_seq_cst) != 0) wake_all(shared->round);
    return;
  }
  const auto over = [&](uint32_t seen) { return static_cast<int32_t>(seen - count) >= 0; };
  for (int spin = 0; spin < spins_; ++spin) {
    if (over(shared->round.load(std::memory_order_acquire))) return;
    pause_briefly();
  }
  const Clock::time_point since = Clock::now();
  while (!over(shared->round.load(std::memory_order_acquire))) {
    shared->round_sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = shared->round.load(std::memory_order_seq_cst);
    if (!over(seen)) sleep_on(shared->round, seen);
    shared->round_sleepers.fetch_sub(1, std::memory_order_seq_cst);
    for (int step = 1; step < segments_->size() && !over(shared->round.load(std::memory_order_acquire)); ++step) {
      const int rank = (rank_ + step) % segments_->size();
      if (!is_here(rank, count)) still_missing(rank, since);
    }
  }
}

// Looks after a rank that others have waited for.
void ShmChannel::still_missing(int rank, Clock::time_point since) {
  look_after(rank, since, waiting_in());
  if (rank_ != 0 || overdue_[rank] || Clock::now() - since <= kWorthALine) return;
  overdue_[rank] = true;
  board_->warn(board_->called(rank) + " lets the others wait in " + waiting_in() + ", for " +
               std::to_string(kWorthALine.count()) + " s now; after " + std::to_string(timeout_.load().count() / 1000) +
               " s of waiting (comm.timeout, DS_COMM_TIMEOUT_S) the ranks give up. This is said once.");
}

std::string ShmChannel::waiting_in() const {
  return describe(record_of(rank_)) + ", number " + std::to_string(entered_) + " of this group";
}

void ShmChannel::look_after(int rank, Clock::time_point since, const std::string& what) {
  Line* theirs = line(rank);
  for (int other = 0; other < segments_->size(); ++other)
    if (line(other)->failed.load(std::memory_order_acquire)) give_up(line(other)->why);
  const auto lost = [&](const std::string& how) {
    give_up(board_->called(rank) + " " + how + " while rank " + std::to_string(rank_) + " waited for it in " + what +
            "; it has entered " + std::to_string(theirs->entered.load()) + ".");
  };
  if (!segments_->alive(rank)) lost("has ended");
  if (theirs->closed.load()) lost("has destroyed its process group");
  const auto waited = std::chrono::duration_cast<milliseconds>(Clock::now() - since);
  if (waited >= timeout_.load())
    lost("has not come for " + std::to_string(std::chrono::duration_cast<std::chrono::seconds>(waited).count()) + " s");
}

void ShmChannel::stop(const std::string& why) noexcept {
  Line* mine = line(rank_);
  if (giving_up_.exchange(true)) return;
  std::strncpy(mine->why, why.c_str(), sizeof(mine->why) - 1);
  mine->failed.store(1, std::memory_order_release);
  wake_all(mine->met);
  wake_all(line(0)->round);
}

void ShmChannel::give_up(const std::string& why) {
  stop(why);
  fail(ErrorKind::kRuntime, why, board_->report(why));
}

}  // namespace ds::comm
