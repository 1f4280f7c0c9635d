// Notes from one process of a host to another, in memory that both have mapped: the receiver makes it, the sender opens
// it by the receiver's number (/proc), and whoever waits sleeps on a futex.
//
// Two threads of the receiver may wait, one that has nothing else to do and one whose caller wants the next note now:
// only that one is woken, so a message costs one switch of threads.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/clock.h"
#include "comm/pipe/pipe_message.h"
#include "comm/segments/shared_file.h"

namespace ds::comm {

class NoteRing {
 public:
  static constexpr uint32_t kSlots = 4;  // notes that have not been taken back, at most
  enum Waiter : uint32_t { kThread = 1, kCaller = 2 };
  using Deadline = Clock::time_point;

  // ---- sender ----
  void put(const PipeNote& note);  // the caller has waited until fewer than kSlots are not done
  // Whether the receiver has all of note `number` (from 0); waits a moment for it.
  bool done(int64_t number, milliseconds moment) const;

  // Called by either side: nothing comes or goes any more, and why. All waits return. The first text counts.
  void close(const std::string& why);
  std::string closed() const;  // "": it is open

  // ---- receiver ----
  // Whether note `number` is there; waits a moment for it.
  bool arrived(int64_t number, Waiter waiter, milliseconds moment) const;
  const PipeNote& note(int64_t number) const { return slots_[number % kSlots]; }
  void finish(int64_t number);        // its note and what it offers are not needed any more
  void wake(uint32_t waiters) const;  // of this process: arrived() returns

 private:
  static uint32_t low(int64_t number) { return static_cast<uint32_t>(number); }

  mutable std::atomic<uint32_t> sent_, done_;  // notes
  mutable std::atomic<uint32_t> caller_waits_, sender_waits_;
  mutable std::atomic<uint32_t> closing_, closed_;
  char why_[1024];
  PipeNote slots_[kSlots];
};

// `count` rings in memory that other processes of this host can open.
class NoteRings {
 public:
  explicit NoteRings(int count);  // empty ones. Without memory to share file() is none, and at() is not to be called
  // Those of another process, which has told its file(); null where they cannot be opened.
  static std::shared_ptr<NoteRings> of(const SharedFile& file, int count);
  ~NoteRings();
  NoteRings(const NoteRings&) = delete;

  const SharedFile& file() const { return file_; }
  NoteRing& at(int index) const { return rings_[index]; }

 private:
  NoteRings() = default;
  bool map(int file, int count);

  NoteRing* rings_ = nullptr;
  size_t bytes_ = 0;
  SharedFile file_;
};

}  // namespace ds::comm
