#include "comm/boards/error_propagation.h"

#include <unistd.h>

#include <sstream>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "comm/boards/record.h"
#include "comm/segments/shared_segments.h"

namespace ds::comm {

namespace {

constexpr int64_t kLookUs = 250'000;
constexpr int64_t kEndsUs = 500'000;
constexpr milliseconds kDelivery(1500);
constexpr milliseconds kMeeting(1000);  // how long a new object waits for that of the keeper

std::string string_of(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }
std::vector<uint8_t> value_of(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

ErrorPropagation::ErrorPropagation(Store store, int rank, std::vector<std::string> names, OnError on_error,
                                   PositionNames position_names, int keeper)
    : store_(std::move(store)),
      rank_(rank),
      names_(std::move(names)),
      position_names_(std::move(position_names)),
      keeper_(keeper),
      host_(std::to_string(host_id())),
      pids_(names_.size()),
      pages_(names_.size()),
      on_error_(std::move(on_error)) {
  pages_.at(rank_) = position_;
  const SharedFile& page = position_->file();
  store_->set("who" + std::to_string(rank_), value_of(std::to_string(getpid()) + " " + host_ + " " +
                                                      std::to_string(page.file) + " " + std::to_string(page.nonce)));
  if (rank_ == keeper_) store_->set("position", value_of(""));
  store_->add("known" + std::to_string(rank_), 1);
  if (keeper_ < 0 || rank_ == keeper_) return;
  try {  // the keeper may end at the start of its first batch, before a look has met it
    store_->wait({"known" + std::to_string(keeper_)}, kMeeting);
    meet(keeper_);
  } catch (const std::exception&) {  // it is late, and the next look meets it, or the store has gone
    return;
  }
}

ErrorPropagation::~ErrorPropagation() {
  if (owner_.here()) leave();
}

void ErrorPropagation::leave() noexcept {
  working_ = false;
  if (left_.exchange(true)) return;
  try {
    store_->add("left" + std::to_string(rank_), 1);
  } catch (const std::exception&) {  // the store has gone, and with it its readers
    return;
  }
}

std::string ErrorPropagation::error() const {
  std::lock_guard lock(mutex_);
  return error_;
}

void ErrorPropagation::receive(const std::string& why) {
  OnError on_error;
  {
    std::lock_guard lock(mutex_);
    if (!error_.empty()) return;
    error_ = why;
    on_error = std::exchange(on_error_, nullptr);
  }
  if (on_error) on_error(why);
  try {
    store_->add("received", 1);
  } catch (const std::exception&) {  // the store has gone, and with it the ranks that wait for this
    return;
  }
}

void ErrorPropagation::await_delivery() {
  const auto deadline = Clock::now() + kDelivery;
  try {
    while (store_->add("received", 0) + ended_ < static_cast<int64_t>(names_.size()) && Clock::now() < deadline)
      std::this_thread::sleep_for(milliseconds(20));
  } catch (const std::exception&) {  // the store has gone
    return;
  }
}

std::string ErrorPropagation::report(const std::string& why) { return report_or(why, why); }

std::string ErrorPropagation::report_or(const std::string& why, const std::string& alone) {
  try {
    if (store_->add("reporting", 1) == 1) {
      store_->set("why", value_of(why));
      store_->add("reported", 1);
    } else {
      store_->wait({"why"}, milliseconds(1000));
    }
    receive(string_of(store_->get("why")));
  } catch (const std::exception&) {  // the store has gone
    receive(alone);
  }
  return error();
}

void ErrorPropagation::meet(int rank) {
  if (store_->add("known" + std::to_string(rank), 0)) meet(rank, string_of(store_->get("who" + std::to_string(rank))));
}

// `who`: process, host, and the file of its PositionPage with its nonce, if it has one.
void ErrorPropagation::meet(int rank, const std::string& who) {
  std::istringstream words(who);
  std::string host;
  SharedFile file;
  words >> file.pid >> host >> file.file >> file.nonce;
  if (words.fail()) file.file = -1;
  pids_[rank] = host == host_ ? file.pid : -1;
  if (host != host_) return;
  const auto page = PositionPage::of(file);
  std::lock_guard lock(mutex_);
  pages_[rank] = page;
}

std::string ErrorPropagation::where() const {
  std::lock_guard lock(mutex_);
  std::string found;
  for (size_t rank = 0; rank < pages_.size(); ++rank) {
    const std::string position = pages_[rank] ? pages_[rank]->text(position_names_) : "";
    if (!position.empty()) found += (found.empty() ? "" : "; ") + names_[rank] + ": " + position;
  }
  return found;
}

int ErrorPropagation::ended_rank() {
  for (int rank = 0; rank < static_cast<int>(names_.size()); ++rank) {
    if (rank == rank_ || pids_[rank] < 0) continue;
    if (pids_[rank] == 0) meet(rank);
    if (pids_[rank] > 0 && process_ended(pids_[rank])) return rank;
  }
  return -1;
}

// The store ends before its process does: the kernel closes the sockets of one that is killed first.
bool ErrorPropagation::keeper_ends() const {
  if (keeper_ < 0 || rank_ == keeper_ || pids_[keeper_] <= 0) return false;
  for (int64_t until = now_us() + kEndsUs; now_us() < until; std::this_thread::sleep_for(milliseconds(2)))
    if (process_ended(pids_[keeper_])) return true;
  return false;
}

std::string ErrorPropagation::position_text(int rank) const {
  std::lock_guard lock(mutex_);
  return pages_[rank] ? pages_[rank]->text(position_names_) : "";
}

void ErrorPropagation::see_keeper() {
  if (keeper_ < 0) return;
  if (rank_ == keeper_) {
    const std::string position = position_text(rank_);
    store_->set("position", value_of(position));
  } else if (pids_[keeper_] < 0) {
    const std::string position = string_of(store_->get("position"));
    std::lock_guard lock(mutex_);
    keepers_position_ = position;
  }
}

std::string ErrorPropagation::without_store() const {
  const std::string gone = "the job's store";
  if (keeper_ < 0) return "the pipeline failed: " + gone + " has gone";
  std::string position = position_text(keeper_);
  std::lock_guard lock(mutex_);
  if (position.empty()) position = keepers_position_;
  return "the pipeline failed: " + names_[keeper_] + " has ended in the middle of a batch" +
         (position.empty() ? "" : ", last seen in " + position) + ": " + gone + ", which its process had, has gone";
}

void ErrorPropagation::look(const DiagnosticCallbacks&) {
  if (!owner_.here() || now_us() < next_look_us_ || !error().empty()) return;
  next_look_us_ = now_us() + kLookUs;
  if (!working_) {
    if (keeper_ < 0 || rank_ == keeper_ || pids_[keeper_] != 0 || left_) return;
    try {  // the keeper may end at the start of its first batch
      meet(keeper_);
    } catch (const std::exception&) {  // the store has gone while no rank works
      return;
    }
    return;
  }
  int ended = -1;
  const auto text = [&](int rank, const std::string& seen_by) {
    const std::string position = position_text(rank);
    return "the pipeline failed: " + names_[rank] + " (process " + std::to_string(pids_[rank]) +
           ") has ended in the middle of a batch" + (position.empty() ? "" : ", in " + position) + seen_by;
  };
  // Without the store no rank knows which one was first, so all report the same text.
  const std::string first = "; " + names_[rank_] + " has seen it first";
  try {
    ended = ended_rank();
    ended_ = ended >= 0;
    see_keeper();
    if (store_->add("reported", 0)) {
      receive(string_of(store_->get("why")));
    } else if (ended >= 0 && !store_->add("left" + std::to_string(ended), 0)) {
      report_or(text(ended, first), text(ended, ""));
    }
  } catch (const std::exception&) {  // the store has gone
    if (ended < 0 && keeper_ends()) ended = keeper_;
    receive(ended >= 0 ? text(ended, "") : without_store());
  }
}

}  // namespace ds::comm
