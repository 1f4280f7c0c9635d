// The time of a training step that is planned: the host, which runs the program, one stream that computes, and one for
// the calls of each group of ranks.
#pragma once
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace ds::plan {

// The cost of a call: `latency` for each of log2(ranks) rounds, and the bytes that a rank sends at `rate`.
struct LinkCost {
  int64_t latency_ns = 0;
  int64_t bytes_per_second = 0;  // 0: no time
  int64_t time_of(int64_t sent_bytes, int ranks) const;
};

// Numbers of things that the host has done in a phase of the step.
struct StepCounts {
  int64_t dispatched = 0;   // calls of torch's dispatcher
  int64_t launches = 0;     // operations that the device carries out
  int64_t kernels = 0;      // of them calls of kernels of this library
  int64_t collectives = 0;  // calls of groups of ranks
  int64_t host_waits = 0;   // waits for the device
};

// A row of the timeline. `lane`: kHost, kCompute, or the group of a call. `exposed`: of a call, the time for which the
// stream that computes has waited for it.
struct StepSpan {
  std::string lane, name, phase;
  int64_t begin = 0, end = 0, exposed = 0;
};

// Nanoseconds since the step began. The host starts operations one after the other, and they follow each other on the
// stream that computes. `synchronous`: the host waits for the end of each operation, as on the CPU. A call begins when
// the host and the stream that computes have reached it and the earlier call of its group has ended; nobody waits for
// it but in wait(). `call_ns`: the time that the host takes to start a call; none on the CPU.
class StepPlan {
 public:
  static constexpr const char* kHost = "host";
  static constexpr const char* kCompute = "compute";

  explicit StepPlan(bool synchronous = false, int64_t call_ns = 0)
      : synchronous_(synchronous), call_ns_(synchronous ? 0 : call_ns) {}
  bool synchronous() const { return synchronous_; }
  void set_phase(std::string phase);                     // of what follows: forward, backward, step
  void host(int64_t ns);                                 // the host works between two operations
  void dispatched();                                     // torch's dispatcher was called
  void compute(int64_t ns, std::string_view name = {});  // an operation
  void kernel(int64_t ns, std::string_view name = {});   // the same, by a kernel of this library
  // A call; returns its number.
  int64_t start(const std::string& group, int64_t ns, std::string_view name = {});
  void exchange(int64_t ns);  // a call that hosts make beside their devices: the host has its results
  void wait(int64_t call);
  // The moment at which the stream that computes has done what it was asked for up to now, as an event tells it.
  int64_t mark() const;
  // The host waits for a mark, or for all operations that it has started. Where the host waits for each operation
  // anyway, this does not count.
  void host_waits(std::string_view what, int64_t mark);
  void host_waits(std::string_view what);
  void end();  // of the step: the stream that computes has reached the host
  void reset();

  int64_t now() const;                            // of the stream that computes
  std::map<std::string, int64_t> phases() const;  // its time by phase, waits for the host too, those for calls apart:
  int64_t waited() const;                         // for calls
  int64_t communicated() const;                   // the sum of all calls, whether or not somebody waited
  std::map<std::string, StepCounts> counts() const;  // by phase

  // Whether rows are kept from now on; reset() drops those of the step before.
  void record(bool on);
  std::vector<StepSpan> timeline() const;

 private:
  static constexpr size_t kNoRow = static_cast<size_t>(-1);
  struct Call {
    int64_t end;
    size_t row;
  };
  void reach_host();
  void host_until(int64_t then, std::string_view name);
  void wait_on_host(std::string_view what, int64_t mark);
  void compute_for(int64_t ns, std::string_view name);
  size_t add_row(std::string_view lane, std::string_view name, int64_t begin, int64_t end);  // kNoRow: none is kept

  const bool synchronous_;
  const int64_t call_ns_;
  mutable std::mutex mutex_;
  std::string phase_;
  int64_t host_ = 0, now_ = 0, waited_ = 0, communicated_ = 0;
  bool recorded_ = false;
  size_t last_host_row_ = kNoRow;
  std::vector<Call> calls_;
  std::vector<StepSpan> timeline_;
  std::map<std::string, int64_t> free_at_, phases_;
  std::map<std::string, StepCounts> counts_;
};

}  // namespace ds::plan
