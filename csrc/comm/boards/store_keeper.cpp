#include "comm/boards/store_keeper.h"

#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "comm/segments/shared_segments.h"

namespace ds::comm {

namespace {

constexpr milliseconds kStoreNap(20);
constexpr std::string_view kGone("gone");  // instead of a host and a process

std::string key_of(int rank) { return "deepspeed/process/" + std::to_string(rank); }

}  // namespace

StoreKeeper::StoreKeeper(c10::intrusive_ptr<c10d::Store> store, int rank, int world)
    : store_(std::move(store)), rank_(rank), world_(world), host_(std::to_string(host_id()) + " ") {
  const std::string mine = host_ + std::to_string(getpid());
  store_->set(key_of(rank_), std::vector<uint8_t>(mine.begin(), mine.end()));
}

StoreKeeper::~StoreKeeper() {
  ending_ = true;
  if (!thread_.joinable()) return;
  owner_.here() ? thread_.join() : thread_.detach();
}

void StoreKeeper::goodbye() {
  if (!store_ || thread_.joinable() || !owner_.here()) return;
  try {
    store_->set(key_of(rank_), std::vector<uint8_t>(kGone.begin(), kGone.end()));
  } catch (const std::exception&) {  // rank 0 has ended, and the store with it
    store_.reset();
    return;
  }
  if (rank_ == 0 && world_ > 1) {
    thread_ = std::thread([this] { keep(); });
  } else {
    store_.reset();
  }
}

void StoreKeeper::wait() {
  if (thread_.joinable() && owner_.here()) thread_.join();
}

void StoreKeeper::keep() {
  const auto deadline = Clock::now() + kMost;
  try {
    while (!ending_ && Clock::now() < deadline && !all_gone()) std::this_thread::sleep_for(kStoreNap);
  } catch (const std::exception&) {  // the store is in another process, which has ended
    ending_ = true;
  }
  store_.reset();
}

bool StoreKeeper::all_gone() {
  for (int rank = 1; rank < world_; ++rank) {
    if (!store_->check({key_of(rank)})) return false;
    const std::vector<uint8_t> bytes = store_->get(key_of(rank));
    const std::string theirs(bytes.begin(), bytes.end());
    if (theirs == kGone) continue;
    // Ranks of other hosts and ranks that have not ended say goodbye themselves.
    if (theirs.compare(0, host_.size(), host_) != 0) return false;
    if (!process_ended(std::strtoll(theirs.c_str() + host_.size(), nullptr, 10))) return false;
  }
  return true;
}

}  // namespace ds::comm
