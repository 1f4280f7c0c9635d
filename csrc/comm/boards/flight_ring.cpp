#include "comm/boards/flight_ring.h"

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "comm/calls/reduce_op.h"

namespace ds::comm {

void FlightRing::write(Slot& slot, const Flight& flight) {
  uint64_t words[kWords];
  std::memcpy(words, static_cast<const void*>(&flight), sizeof(flight));
  const uint64_t version = slot.version.load(std::memory_order_relaxed);
  slot.version.store(version + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  for (size_t i = 0; i < kWords; ++i) slot.words[i].store(words[i], std::memory_order_relaxed);
  slot.version.store(version + 2, std::memory_order_release);
}

bool FlightRing::read(const Slot& slot, Flight& flight) {
  for (int attempt = 0; attempt < 100; ++attempt) {
    const uint64_t before = slot.version.load(std::memory_order_acquire);
    uint64_t words[kWords];
    for (size_t i = 0; i < kWords; ++i) words[i] = slot.words[i].load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (before == 0) return false;
    if (before % 2 || slot.version.load(std::memory_order_relaxed) != before) continue;
    std::memcpy(static_cast<void*>(&flight), words, sizeof(flight));
    return true;
  }
  return false;  // its writer died while it wrote
}

void FlightRing::begin(const Record& call, int64_t number) {
  write(slots_[number % kLength], {call, number, call.at_us, 0});
  begun_.store(number, std::memory_order_release);
}

void FlightRing::end(int64_t number) {
  Slot& slot = slots_[number % kLength];
  // Only the last word changes: cheaper than the whole, and as consistent for readers, who see it or do not.
  constexpr size_t kEnd = offsetof(Flight, end_us) / sizeof(uint64_t);
  slot.words[kEnd].store(static_cast<uint64_t>(now_us()), std::memory_order_relaxed);
}

std::vector<Flight> FlightRing::read() const {
  std::vector<Flight> found;
  const int64_t last = begun();
  for (int64_t number = std::max<int64_t>(1, last - kLength + 1); number <= last; ++number) {
    Flight flight;
    if (read(slots_[number % kLength], flight) && flight.number == number) found.push_back(flight);
  }
  return found;
}

double epoch_seconds(int64_t us) {
  const auto wall = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  return wall - static_cast<double>(now_us() - us) * 1e-6;
}

std::string json_text(const std::string& text) {
  std::string made = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      made += '\\';
      made += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof(code), "\\u%04x", c);
      made += code;
    } else {
      made += c;
    }
  }
  return made + "\"";
}

std::string to_json(const std::vector<Flight>& flights) {
  std::string text = "[";
  for (const Flight& flight : flights) {
    const Record& call = flight.call;
    char times[128];
    std::snprintf(times, sizeof(times), "\"began\": %.6f, \"seconds\": ", epoch_seconds(flight.begin_us));
    text += text.size() > 1 ? ",\n  {" : "\n  {";
    text += "\"number\": " + std::to_string(flight.number) + ", \"op\": " + json_text(call.what) +
            ", \"tag\": " + json_text(call.tag) +
            ", \"dtype\": " + (call.type >= 0 ? json_text(type_name(call.type)) : "null") +
            ", \"numel\": " + std::to_string(call.numel) +
            ", \"reduction\": " + (call.op >= 0 ? json_text(reduce_op_name(static_cast<ReduceOp>(call.op))) : "null") +
            ", \"root\": " + (call.root >= 0 ? std::to_string(call.root) : "null") + ", " + times;
    std::snprintf(times, sizeof(times), "%.6f", static_cast<double>(flight.end_us - flight.begin_us) * 1e-6);
    text += flight.end_us ? times : "null";
    text += std::string(", \"state\": ") + (flight.end_us ? "\"done\"}" : "\"under way\"}");
  }
  return text + "]";
}

}  // namespace ds::comm
