// Streams: queues with a thread each. What they run is ordered by the queue and by events alone; a seed decides how
// long each operation is put off, and the mode `lazy` puts everything off until somebody waits, for up to 5 ms.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "order.h"
#include "standin.h"

// torch's type of the device. The library that is compiled with DS_STANDIN_IS_HPU has Gaudi's.
#ifdef DS_STANDIN_IS_HPU
#define DS_STANDIN_TYPE HPU
#else
#define DS_STANDIN_TYPE PrivateUse1
#endif

namespace standin {

constexpr c10::DeviceType kStandin = c10::DeviceType::DS_STANDIN_TYPE;

constexpr c10::DeviceIndex kDevices = 2;

class Stream {
 public:
  Stream(size_t number, c10::DeviceIndex device, bool is_default)
      : number(number), device(device), id(is_default ? 0 : reinterpret_cast<c10::StreamId>(this)) {}

  const size_t number;
  const c10::DeviceIndex device;
  const c10::StreamId id;  // the address, which kernels get as their stream; 0: the default stream
  Clock clock;             // under the order's mutex, as what follows
  uint64_t queued = 0;     // the last operation

  c10::Stream c10() const { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kStandin, device), id); }
  // Under the order's mutex. `put_off`: the seed and the mode decide when.
  void push(uint64_t operation, bool put_off, std::function<void()> work);
  void hurry(uint64_t operation);  // somebody waits
  void wait(uint64_t operation);   // throws what an operation of the stream has thrown
  bool done(uint64_t operation);
  void end();

 private:
  struct Work {
    uint64_t operation;
    bool put_off;
    std::chrono::steady_clock::time_point queued;
    std::function<void()> run;
  };
  void run_queue();
  void put_off(std::unique_lock<std::mutex>& lock, const Work& work);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;
  std::thread thread_;
  uint64_t done_ = 0, hurried_ = 0;
  bool ended_ = false;
  std::string error_;
};

// The work of a stream up to a moment: what an event remembers.
struct Mark {
  Stream* stream = nullptr;
  uint64_t operation = 0;
  Clock clock;
  std::shared_ptr<std::chrono::steady_clock::time_point> time;
};

c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex device);

Stream& stream_of(const c10::Stream& stream);
bool has_ended(const Operation& operation);
Stream& current_stream(c10::DeviceIndex device);  // of this thread, as in CUDA; the default stream at first
Stream& exchange_stream(Stream& stream);
Stream& stream_from_pool(c10::DeviceIndex device);  // one after the other, of 32
std::vector<Stream*> streams_of(c10::DeviceIndex device);

// Queues work and checks what it reads and writes. Addresses are those that tensors carry. Gives its number on the
// stream.
uint64_t submit(Stream& stream, std::string name, std::vector<Access> accesses, std::function<void()> work);
// The same for work that others wait for, which runs in the mode `null`, too.
uint64_t submit_always(Stream& stream, std::string name, std::vector<Access> accesses, std::function<void()> work);
// The same for a kernel with pointers that tensors carry: what it touches is found out while it runs.
void submit_kernel(Stream& stream, std::string name, std::function<void()> kernel);

Mark mark(Stream& stream);    // what is queued so far
Mark record(Stream& stream);  // the same, with the time when it is reached
void wait(Stream& stream, const Mark& mark);
void wait_on_host(const Mark& mark);
bool passed(const Mark& mark);     // true orders as a wait does
void wait_unseen(Stream& stream);  // for the stand-in's own needs: orders nothing
void synchronize_device(c10::DeviceIndex device);

void choose(uint64_t seed, StandinMode mode);  // how work is put off from now on; seed 0: not at all
bool runs_nothing();                           // the mode `null`
void end_streams();                            // before the process ends

}  // namespace standin
