#include "comm/alarm.h"

#include <unistd.h>

#include <chrono>
#include <sstream>
#include <thread>
#include <utility>

#include "comm/record.h"
#include "comm/shared_segments.h"

namespace ds::comm {

namespace {

constexpr int64_t kLookUs = 250'000;
constexpr int64_t kEndsUs = 500'000;
constexpr std::chrono::milliseconds kOthersHear(1500);

std::string string_of(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }
std::vector<uint8_t> value_of(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

Alarm::Alarm(Store store, int rank, std::vector<std::string> names, Told told, PlaceNames places, int keeper)
    : store_(std::move(store)),
      rank_(rank),
      names_(std::move(names)),
      place_names_(std::move(places)),
      keeper_(keeper),
      host_(std::to_string(host_id())),
      pids_(names_.size()),
      pages_(names_.size()),
      told_(std::move(told)) {
  pages_.at(rank_) = place_;
  const SharedFile& page = place_->file();
  store_->set("who" + std::to_string(rank_), value_of(std::to_string(getpid()) + " " + host_ + " " +
                                                      std::to_string(page.file) + " " + std::to_string(page.nonce)));
  if (rank_ == keeper_) store_->set("place", value_of(""));
  store_->add("known" + std::to_string(rank_), 1);
}

Alarm::~Alarm() {
  if (owner_.here()) goodbye();
}

void Alarm::goodbye() noexcept {
  working_ = false;
  if (left_.exchange(true)) return;
  try {
    store_->add("left" + std::to_string(rank_), 1);
  } catch (const std::exception&) {  // the store has gone, and with it whoever would ask
    return;
  }
}

std::string Alarm::heard() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return heard_;
}

void Alarm::hear(const std::string& why) {
  Told told;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!heard_.empty()) return;
    heard_ = why;
    told = std::exchange(told_, nullptr);
  }
  if (told) told(why);
  try {
    store_->add("heard", 1);
  } catch (const std::exception&) {  // the store has gone, and nobody waits for this
    return;
  }
}

void Alarm::await_all() {
  const auto deadline = std::chrono::steady_clock::now() + kOthersHear;
  try {
    while (store_->add("heard", 0) + ended_ < static_cast<int64_t>(names_.size()) &&
           std::chrono::steady_clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
  } catch (const std::exception&) {  // the store has gone
    return;
  }
}

std::string Alarm::ring(const std::string& why) { return ring_or(why, why); }

std::string Alarm::ring_or(const std::string& why, const std::string& alone) {
  try {
    if (store_->add("ringing", 1) == 1) {
      store_->set("why", value_of(why));
      store_->add("rung", 1);
    } else {
      store_->wait({"why"}, std::chrono::milliseconds(1000));
    }
    hear(string_of(store_->get("why")));
  } catch (const std::exception&) {  // the store has gone
    hear(alone);
  }
  return heard();
}

void Alarm::meet(int rank) {
  if (store_->add("known" + std::to_string(rank), 0)) meet(rank, string_of(store_->get("who" + std::to_string(rank))));
}

// `who`: process, host, and the file of its place with its nonce, if there is one.
void Alarm::meet(int rank, const std::string& who) {
  std::istringstream words(who);
  std::string host;
  SharedFile file;
  words >> file.pid >> host >> file.file >> file.nonce;
  if (words.fail()) file.file = -1;
  pids_[rank] = host == host_ ? file.pid : -1;
  if (host != host_) return;
  const auto page = PlacePage::of(file);
  std::lock_guard<std::mutex> lock(mutex_);
  pages_[rank] = page;
}

std::string Alarm::where() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::string found;
  for (size_t rank = 0; rank < pages_.size(); ++rank) {
    const std::string place = pages_[rank] ? pages_[rank]->text(place_names_) : "";
    if (!place.empty()) found += (found.empty() ? "" : "; ") + names_[rank] + ": " + place;
  }
  return found;
}

int Alarm::ended_rank() {
  for (int rank = 0; rank < static_cast<int>(names_.size()); ++rank) {
    if (rank == rank_ || pids_[rank] < 0) continue;
    if (pids_[rank] == 0) meet(rank);
    if (pids_[rank] > 0 && process_ended(pids_[rank])) return rank;
  }
  return -1;
}

// The store ends before its process does: the kernel closes the sockets of one that is killed first.
bool Alarm::keeper_ends() const {
  if (keeper_ < 0 || rank_ == keeper_ || pids_[keeper_] <= 0) return false;
  for (int64_t until = now_us() + kEndsUs; now_us() < until; std::this_thread::sleep_for(std::chrono::milliseconds(2)))
    if (process_ended(pids_[keeper_])) return true;
  return false;
}

std::string Alarm::place_text(int rank) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return pages_[rank] ? pages_[rank]->text(place_names_) : "";
}

void Alarm::see_keeper() {
  if (keeper_ < 0) return;
  if (rank_ == keeper_) {
    const std::string place = place_text(rank_);
    store_->set("place", value_of(place));
  } else if (pids_[keeper_] < 0) {
    const std::string place = string_of(store_->get("place"));
    std::lock_guard<std::mutex> lock(mutex_);
    keepers_place_ = place;
  }
}

std::string Alarm::without_store() const {
  const std::string gone = "the job's store";
  if (keeper_ < 0) return "the pipeline failed: " + gone + " has gone";
  std::string place = place_text(keeper_);
  std::lock_guard<std::mutex> lock(mutex_);
  if (place.empty()) place = keepers_place_;
  return "the pipeline failed: " + names_[keeper_] + " has ended in the middle of a batch" +
         (place.empty() ? "" : ", last seen in " + place) + ": " + gone + ", which its process had, has gone";
}

void Alarm::look(const DiagnosticCallbacks&) {
  if (!owner_.here() || now_us() < next_look_us_ || !heard().empty()) return;
  next_look_us_ = now_us() + kLookUs;
  if (!working_) {
    if (keeper_ < 0 || rank_ == keeper_ || pids_[keeper_] != 0 || left_) return;
    try {  // it may end in the first moment of its first batch
      meet(keeper_);
    } catch (const std::exception&) {  // the store has gone, while nobody works
      return;
    }
    return;
  }
  int ended = -1;
  const auto text = [&](int rank, const std::string& seen_by) {
    const std::string place = place_text(rank);
    return "the pipeline failed: " + names_[rank] + " (process " + std::to_string(pids_[rank]) +
           ") has ended in the middle of a batch" + (place.empty() ? "" : ", in " + place) + seen_by;
  };
  // Without the store, which ended with its rank, nobody knows who was first: all say the same.
  const std::string first = "; " + names_[rank_] + " has seen it first";
  try {
    ended = ended_rank();
    ended_ = ended >= 0;
    see_keeper();
    if (store_->add("rung", 0)) {
      hear(string_of(store_->get("why")));
    } else if (ended >= 0 && !store_->add("left" + std::to_string(ended), 0)) {
      ring_or(text(ended, first), text(ended, ""));
    }
  } catch (const std::exception&) {  // the store has gone
    if (ended < 0 && keeper_ends()) ended = keeper_;
    hear(ended >= 0 ? text(ended, "") : without_store());
  }
}

}  // namespace ds::comm
