// The last collectives of a rank, as a flight recorder keeps them. It may lie in memory that several processes share:
// then the others can still read it when its owner is dead.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/boards/record.h"

namespace ds::comm {

struct Flight {
  Record call;
  int64_t number = 0;  // of the group, from 1
  int64_t begin_us = 0;
  int64_t end_us = 0;  // 0: it has not ended
};

// Zeros are an empty ring. One thread writes at a time; any thread of any process reads at any time.
class FlightRing {
 public:
  static constexpr int kLength = 256;

  void begin(const Record& call, int64_t number);  // a call under way; number: one more than the last
  void end(int64_t number);
  int64_t begun() const { return begun_.load(std::memory_order_acquire); }
  std::vector<Flight> read() const;  // oldest first; a flight that is being written is left out

 private:
  static_assert(sizeof(Flight) % sizeof(uint64_t) == 0);
  static constexpr size_t kWords = sizeof(Flight) / sizeof(uint64_t);
  struct Slot {
    std::atomic<uint64_t> version;  // odd while it is written
    std::atomic<uint64_t> words[kWords];
  };
  static void write(Slot& slot, const Flight& flight);
  static bool read(const Slot& slot, Flight& flight);

  std::atomic<int64_t> begun_;
  Slot slots_[kLength];
};

// The flights of one rank as a JSON list; times as seconds since the epoch.
std::string to_json(const std::vector<Flight>& flights);
std::string json_text(const std::string& text);  // quoted and escaped

// Seconds since the epoch of a now_us().
double epoch_seconds(int64_t us);

}  // namespace ds::comm
