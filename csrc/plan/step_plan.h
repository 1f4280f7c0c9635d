// The time of a training step that is planned: the host, which runs the program, one stream that computes, and one for
// the calls of each group of ranks.
#pragma once
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace ds::plan {

// The cost of a call: `latency` for each of log2(ranks) rounds, and the bytes that a rank sends at `rate`.
struct LinkCost {
  int64_t latency_ns = 0;
  int64_t bytes_per_second = 0;  // 0: no time
  int64_t time_of(int64_t sent_bytes, int ranks) const;
};

// Nanoseconds since the step began. The host starts operations one after the other, and they follow each other on the
// stream that computes. `synchronous`: the host waits for the end of each operation, as on the CPU. A call begins when
// the host and the stream that computes have reached it and the earlier call of its group has ended; nobody waits for
// it but in wait().
class StepPlan {
 public:
  explicit StepPlan(bool synchronous = false) : synchronous_(synchronous) {}
  void set_phase(std::string phase);                    // of what follows: forward, backward, step
  void host(int64_t ns);                                // the host works between two operations
  void compute(int64_t ns);                             // an operation
  void synchronize();                                   // the host waits for the operations that it has started
  int64_t start(const std::string& group, int64_t ns);  // a call; returns its number
  void wait(int64_t call);
  void reset();

  int64_t now() const;                            // of the stream that computes
  std::map<std::string, int64_t> phases() const;  // its time by phase, waits for the host too, those for calls apart:
  int64_t waited() const;                         // for calls
  int64_t communicated() const;                   // the sum of all calls, whether or not somebody waited

 private:
  void reach_host();

  const bool synchronous_;
  mutable std::mutex mutex_;
  std::string phase_;
  int64_t host_ = 0, now_ = 0, waited_ = 0, communicated_ = 0;
  std::vector<int64_t> ends_;
  std::map<std::string, int64_t> free_at_, phases_;
};

}  // namespace ds::plan
