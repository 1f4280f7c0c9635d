#include "comm/boards/store_board.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "comm/segments/shared_segments.h"

namespace ds::comm {

namespace {

constexpr int64_t kPollUs = 500'000;
constexpr int64_t kSuspiciousUs = 1'000'000;
constexpr milliseconds kHeard{1200};  // the wait of the rank that fails first until the others have its text
constexpr size_t kPosted = 32;        // flights that a rank posts
constexpr size_t kMostStack = 12 * 1024;

using Bytes = std::vector<uint8_t>;

Bytes bytes_of(const std::string& text) { return {text.begin(), text.end()}; }
std::string text_of(const Bytes& bytes) { return {bytes.begin(), bytes.end()}; }

// Whether it has come about in time.
template <typename Done>
bool within(milliseconds most, const Done& done) {
  const auto deadline = Clock::now() + most;
  while (!done()) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(milliseconds(50));
  }
  return true;
}

bool strict() {
  const char* given = std::getenv("DS_COMM_FINGERPRINTS");
  return given && std::string(given) == "strict";
}

}  // namespace

// The values that a rank posts. Times are of its host's clock; `now_us` gives the difference to another host's clock.
struct StoreBoard::Posted {
  struct Head {
    int64_t tick = 0, now_us = 0, pid = -1;
    int32_t job_rank = -1, waits = 0;
    uint32_t flights = 0, stack = 0;
    char host[64] = "";
    Record message;  // that this rank waits for, since at_us; no name: none
  } head;
  std::vector<Flight> flights;
  std::string stack;

  Bytes packed() {
    head.flights = static_cast<uint32_t>(flights.size());
    head.stack = static_cast<uint32_t>(stack.size());
    Bytes made(sizeof(Head) + flights.size() * sizeof(Flight) + stack.size());
    std::memcpy(made.data(), static_cast<const void*>(&head), sizeof(Head));
    if (!flights.empty())
      std::memcpy(made.data() + sizeof(Head), static_cast<const void*>(flights.data()),
                  flights.size() * sizeof(Flight));
    std::memcpy(made.data() + made.size() - stack.size(), stack.data(), stack.size());
    return made;
  }
  static std::unique_ptr<Posted> of(const Bytes& bytes) {
    auto made = std::make_unique<Posted>();
    if (bytes.size() < sizeof(Head)) return nullptr;
    std::memcpy(static_cast<void*>(&made->head), bytes.data(), sizeof(Head));
    const Head& head = made->head;
    if (bytes.size() != sizeof(Head) + head.flights * sizeof(Flight) + head.stack) return nullptr;
    made->flights.resize(head.flights);
    if (head.flights)
      std::memcpy(static_cast<void*>(made->flights.data()), bytes.data() + sizeof(Head), head.flights * sizeof(Flight));
    made->stack.assign(bytes.end() - head.stack, bytes.end());
    const int64_t behind = comm::now_us() - head.now_us;
    for (Flight& each : made->flights) {
      each.begin_us += behind;
      if (each.end_us) each.end_us += behind;
    }
    return made;
  }
};

StoreBoard::StoreBoard(Store store, int rank, int size, milliseconds timeout, std::string transport,
                       const GroupFacts& facts)
    : Board(rank, facts),
      size_(size),
      timeout_(timeout),
      transport_(std::move(transport)),
      strict_(strict()),
      host_(std::to_string(host_id())),
      ring_(std::make_unique<FlightRing>()),
      store_(std::move(store)) {
  store_->set("who" + std::to_string(rank_), bytes_of(std::to_string(getpid()) + " " + host_));
  store_->add("known" + std::to_string(rank_), 1);
}

StoreBoard::Store StoreBoard::store() const {
  std::lock_guard lock(mutex_);
  if (!store_) fail(ErrorKind::kRuntime, "Rank 0 of the job has ended; nobody knows more.");
  return store_;
}

std::string StoreBoard::failed() const {
  std::lock_guard lock(mutex_);
  return failed_;
}

void StoreBoard::on_failure(std::function<void(const std::string&)> told) {
  std::lock_guard lock(mutex_);
  told_ = std::move(told);
}

void StoreBoard::set_failed(const std::string& why) {
  std::function<void(const std::string&)> told;
  {
    std::lock_guard lock(mutex_);
    if (!failed_.empty()) return;
    failed_ = why;
    told = std::exchange(told_, nullptr);
  }
  if (told) told(why);
}

void StoreBoard::refuse_if_failed() const {
  const std::string why = failed();
  if (!why.empty()) fail(ErrorKind::kRuntime, "this group has failed before: ", why.substr(0, why.find('\n')));
}

int64_t StoreBoard::enter(const Record& call) {
  refuse_if_failed();
  Record mine = call;
  mine.at_us = now_us();
  const int64_t number = ++number_;
  ring_->begin(mine, number);
  if (strict_) compare(mine, number);
  return number;
}

void StoreBoard::wait_begins(const Record* message) {
  const std::lock_guard lock(waits_mutex_);
  if (waits_++ == 0) waiting_since_us_ = now_us();
  if (!message) return;
  message_ = *message;
  message_.at_us = now_us();
}

void StoreBoard::wait_ends() {
  const std::lock_guard lock(waits_mutex_);
  waiting_since_us_ = --waits_ > 0 ? now_us() : 0;
  if (waits_ == 0) message_ = Record();
}

void StoreBoard::ended(int64_t number) { ring_->end(number); }

// Waits until all ranks have said what they call; fails where that differs.
void StoreBoard::compare(const Record& call, int64_t number) {
  const Store store = this->store();
  const std::string here = "call" + std::to_string(number) + "/";
  Bytes bytes(sizeof(Record));
  std::memcpy(bytes.data(), static_cast<const void*>(&call), sizeof(Record));
  store->set(here + std::to_string(rank_), bytes);
  const int64_t began = now_us();
  int64_t met = store->add(here + "met", 1);
  while (met < size_) {
    std::this_thread::sleep_for(std::chrono::microseconds(500));
    met = store->add(here + "met", 0);
    const std::string why = failed();
    if (!why.empty()) fail(ErrorKind::kRuntime, why);
    if (now_us() - began > std::chrono::microseconds(timeout_).count())
      fail(ErrorKind::kRuntime,
           give_up(std::to_string(size_ - met) + " of " + std::to_string(size_) + " ranks have not come to number " +
                   std::to_string(number) + " of group " + name_ + ", " + describe(call)));
  }
  std::vector<RankCall> calls(size_);
  for (int rank = 0; rank < size_; ++rank) {
    const Bytes theirs = store->get(here + std::to_string(rank));
    calls[rank].rank = rank;
    std::memcpy(static_cast<void*>(&calls[rank].call), theirs.data(), std::min(theirs.size(), sizeof(Record)));
  }
  std::string text = mismatch(calls, call, number);
  if (text.empty()) text = unbalanced(calls, number);
  if (!text.empty()) fail(ErrorKind::kRuntime, give_up(text));
  if (rank_ != 0 || number <= 2)
    return;  // all ranks have come to the next call, so they have read the calls before the last
  const std::string before = "call" + std::to_string(number - 2) + "/";
  for (int rank = 0; rank < size_; ++rank) store->deleteKey(before + std::to_string(rank));
  store->deleteKey(before + "met");
}

bool StoreBoard::gone(int rank, const Store& store) const {
  if (!store->add("known" + std::to_string(rank), 0)) return false;
  const std::string who = text_of(store->get("who" + std::to_string(rank)));
  return who.substr(who.find(' ') + 1) == host_ && process_ended(std::strtoll(who.c_str(), nullptr, 10));
}

void StoreBoard::post(const DiagnosticCallbacks& callbacks, const Store& store) {
  Posted mine;
  mine.flights = ring_->read();
  const Flight* const open = oldest_open(mine.flights);
  if (mine.flights.size() > kPosted) {  // the last ones, and the one in which it waits
    std::vector<Flight> kept(mine.flights.end() - kPosted, mine.flights.end());
    if (open && open->number < kept.front().number) kept.front() = *open;
    mine.flights = std::move(kept);
  }
  mine.head.tick = asked_;
  mine.head.now_us = now_us();
  mine.head.pid = getpid();
  mine.head.job_rank = job_rank_;
  mine.head.waits = waiting_since_us_ != 0;
  {
    const std::lock_guard lock(waits_mutex_);
    mine.head.message = message_;
  }
  gethostname(mine.head.host, sizeof(mine.head.host) - 1);
  mine.stack = callbacks.stacks ? callbacks.stacks().substr(0, kMostStack) : "";
  store->set("post" + std::to_string(rank_), mine.packed());
  store->add("posted" + std::to_string(rank_), 1);
}

// By rank; null where a rank has posted nothing since `tick`.
std::vector<std::unique_ptr<StoreBoard::Posted>> StoreBoard::posted(const Store& store, int64_t tick) const {
  std::vector<std::unique_ptr<Posted>> found(size_);
  for (int rank = 0; rank < size_; ++rank) {
    if (!store->add("posted" + std::to_string(rank), 0)) continue;
    auto theirs = Posted::of(store->get("post" + std::to_string(rank)));
    if (theirs && theirs->head.tick >= tick) found[rank] = std::move(theirs);
  }
  return found;
}

// From the watch's thread: answers other ranks; asks them and judges if this rank waits too long.
void StoreBoard::look(const DiagnosticCallbacks& callbacks) {
  Board::look(callbacks);
  if (!owner_.here() || now_us() < next_look_us_) return;
  next_look_us_ = now_us() + kPollUs;
  Store store;
  {
    std::lock_guard lock(mutex_);
    if (!store_) return;
    store = store_;
    callbacks_ = callbacks;
    looking_ = std::this_thread::get_id();
  }
  try {
    const int64_t since = waiting_since_us_;
    const bool waits = since && now_us() - since > kSuspiciousUs;
    const int64_t asked = store->add("asked", waits ? 1 : 0);
    if (asked == asked_) return;
    asked_ = asked;
    post(callbacks, store);
    if (failed().empty() && store->add("failed", 0)) {
      store->add("heard", 1);
      set_failed(text_of(store->get("why")));
    }
    if (waits && failed().empty()) judge(store);
  } catch (const std::exception&) {  // the store has gone, and with it the job; its threads may run hot (torch 1.13)
    std::lock_guard lock(mutex_);
    store_.reset();
  }
}

void StoreBoard::judge(const Store& store) {
  const std::vector<Flight> mine = ring_->read();
  const Flight* const here = oldest_open(mine);
  if (!here) return;
  const auto all = posted(store, 0);
  std::vector<RankCall> same_number;  // of ranks that are in the call with this one's number
  std::string text;
  for (int rank = 0; rank < size_ && text.empty(); ++rank) {
    const Flight* const theirs = rank == rank_ ? here : all[rank] ? oldest_open(all[rank]->flights) : nullptr;
    if (!theirs || theirs->number != here->number) continue;
    same_number.push_back({rank, theirs->call});
    if (rank != rank_) text = mismatch({{rank_, here->call}, {rank, theirs->call}}, here->call, here->number);
  }
  if (text.empty() && same_number.size() == static_cast<size_t>(size_)) text = unbalanced(same_number, here->number);
  if (!text.empty() && store->add("failing", 1) == 1) tell(text, store);
}

std::string StoreBoard::give_up(const std::string& why) {
  if (failed().empty()) {
    try {
      const Store store = this->store();
      // Another rank may be asking all ranks already: the watch receives its text.
      if (store->add("failing", 1) == 1 || !within(2 * kAnswer, [this] { return !failed().empty(); })) tell(why, store);
    } catch (const std::exception&) {
      set_failed(why + " (Rank 0 of the job has ended; nobody knows more.)");
    }
  }
  return failed();
}

void StoreBoard::tell(const std::string& why, const Store& store) {
  const std::string text = why + report(why);
  store->set("why", bytes_of(text));
  store->add("failed", 1);
  store->add("asked", 1);
  store->add("heard", 1);
  int ended = 0;
  for (int rank = 0; rank < size_; ++rank) ended += gone(rank, store);
  within(kHeard, [&] { return store->add("heard", 0) >= size_ - ended; });  // the store may end with this process
  set_failed(text);
}

std::vector<RankView> StoreBoard::views() {
  const Store store = this->store();
  DiagnosticCallbacks callbacks;
  bool others_answer;  // the watch's thread, as for every rank that asks: it sees the stack of this one, too
  {
    std::lock_guard lock(mutex_);
    callbacks = callbacks_;
    others_answer = looking_ != std::thread::id() && looking_ != std::this_thread::get_id();
  }
  const int64_t tick = store->add("asked", 1);
  if (!others_answer) {
    asked_ = tick;
    post(callbacks, store);
  }
  next_look_us_ = 0;
  std::vector<bool> ended(size_);
  for (int rank = 0; rank < size_; ++rank) ended[rank] = gone(rank, store);
  std::vector<std::unique_ptr<Posted>> all;
  const auto silent = [&] {
    for (int rank = 0; rank < size_; ++rank)
      if (!all[rank] && !ended[rank]) return true;
    return false;
  };
  within(kAnswer, [&] {
    all = posted(store, tick);
    return !silent();
  });
  std::vector<RankView> found(size_);
  for (int rank = 0; rank < size_; ++rank) {
    RankView& each = found[rank];
    each.called = "rank " + std::to_string(rank);
    if (!all[rank]) {
      each.status = ended[rank] || gone(rank, store) ? "has ended"
                                                     : "does not answer; it has ended, or its interpreter is busy in C";
      continue;
    }
    const Posted& theirs = *all[rank];
    each.job_rank = theirs.head.job_rank;
    each.pid = theirs.head.pid;
    each.called += " (process " + std::to_string(each.pid) + " on " + theirs.head.host + ")";
    each.flights = theirs.flights;
    const Record& message = theirs.head.message;
    each.status = message.what[0]
                      ? "in " + describe(message) + ", for " + seconds_text(theirs.head.now_us - message.at_us)
                      : status_of(each.flights);
    each.stack = theirs.stack;
  }
  return found;
}

}  // namespace ds::comm
