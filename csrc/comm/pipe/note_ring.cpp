#include "comm/pipe/note_ring.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <string>

#include "base/clock.h"

namespace ds::comm {

namespace {

constexpr uint32_t kSender = 4;

void sleep_on(std::atomic<uint32_t>& word, uint32_t seen, uint32_t waiter, milliseconds moment) {
  timespec until{};
  clock_gettime(CLOCK_MONOTONIC, &until);
  const int64_t nanoseconds = until.tv_nsec + std::chrono::nanoseconds(moment).count();
  until.tv_sec += nanoseconds / 1'000'000'000;
  until.tv_nsec = nanoseconds % 1'000'000'000;
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_BITSET, seen, &until, nullptr, waiter);
}

void wake_on(std::atomic<uint32_t>& word, uint32_t waiters) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_BITSET, INT_MAX, nullptr, nullptr, waiters);
}

bool reached(uint32_t count, uint32_t number) { return static_cast<int32_t>(count - number) > 0; }

}  // namespace

void NoteRing::put(const PipeNote& note) {
  const uint32_t number = sent_.load(std::memory_order_relaxed);
  slots_[number % kSlots] = note;
  sent_.store(number + 1);
  wake_on(sent_, caller_waits_.load() ? kCaller : kThread);
}

bool NoteRing::done(int64_t number, milliseconds moment) const {
  uint32_t seen = done_.load();
  if (reached(seen, low(number)) || moment.count() == 0) return reached(seen, low(number));
  sender_waits_ = 1;
  seen = done_.load();
  if (!reached(seen, low(number)) && !closed_) sleep_on(done_, seen, kSender, moment);
  sender_waits_ = 0;
  return reached(done_.load(), low(number));
}

bool NoteRing::arrived(int64_t number, Waiter waiter, milliseconds moment) const {
  uint32_t seen = sent_.load();
  if (reached(seen, low(number)) || moment.count() == 0) return reached(seen, low(number));
  if (waiter == kCaller) caller_waits_ = 1;
  seen = sent_.load();
  if (!reached(seen, low(number)) && !closed_) sleep_on(sent_, seen, waiter, moment);
  if (waiter == kCaller) caller_waits_ = 0;
  return reached(sent_.load(), low(number));
}

void NoteRing::finish(int64_t number) {
  done_.store(low(number) + 1);
  if (sender_waits_.load()) wake_on(done_, kSender);
}

void NoteRing::close(const std::string& why) {
  if (closing_.exchange(1) == 0) {
    const size_t size = std::min(why.size(), sizeof(why_) - 1);
    std::memcpy(why_, why.data(), size);
    why_[size] = 0;
    closed_ = 1;
  }
  wake_on(sent_, kThread | kCaller);
  wake_on(done_, kSender);
}

std::string NoteRing::closed() const { return closed_ ? why_ : ""; }

void NoteRing::wake(uint32_t waiters) const { wake_on(sent_, waiters); }

NoteRings::NoteRings(int count) {
  const SharedFile made = make_shared_file();
  const int file = static_cast<int>(made.file);
  if (file < 0) return;
  if (ftruncate(file, static_cast<off_t>(sizeof(NoteRing)) * count) == 0 && map(file, count))
    file_ = made;  // zeros: nothing has been sent
  else
    close(file);
}

std::shared_ptr<NoteRings> NoteRings::of(const SharedFile& file, int count) {
  const int opened = open_shared_file(file);
  if (opened < 0) return nullptr;
  const std::shared_ptr<NoteRings> found(new NoteRings);
  const bool fits = lseek(opened, 0, SEEK_END) == static_cast<off_t>(sizeof(NoteRing)) * count;
  const bool mapped = fits && found->map(opened, count);
  close(opened);
  return mapped ? found : nullptr;
}

bool NoteRings::map(int file, int count) {
  bytes_ = sizeof(NoteRing) * static_cast<size_t>(count);
  void* const data = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  rings_ = data == MAP_FAILED ? nullptr : static_cast<NoteRing*>(data);
  return rings_ != nullptr;
}

NoteRings::~NoteRings() {
  if (rings_) munmap(rings_, bytes_);
  if (file_.file >= 0) close(static_cast<int>(file_.file));
}

}  // namespace ds::comm
