// The order of operations, known when they are queued and without running any: vector clocks of streams, events and the
// host. Two accesses to the same bytes, one of them a write, that no clock orders are reported with both stacks,
// however they happened to run.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace standin {

// For each stream, by its number, the last operation that comes before.
class Clock {
 public:
  uint64_t at(size_t stream) const { return stream < last_.size() ? last_[stream] : 0; }
  void set(size_t stream, uint64_t number);
  void join(const Clock& other);

 private:
  std::vector<uint64_t> last_;
};

std::shared_ptr<void> python_frames();  // null where torch cannot tell
std::string text_of_python(void* frames);

// The frames from which a call came. Frames of Python are taken with DS_STANDIN_STACKS=python only: taking them waits
// for the GIL, which a thread that holds a lock of the library must not do.
class Stack {
 public:
  static Stack here();
  std::string text() const;

 private:
  std::array<void*, 24> frames_{};
  int depth_ = 0;
  std::shared_ptr<void> python_;
};

struct Operation {
  std::string name;
  size_t stream = 0;
  uint64_t number = 0;
  Clock before;  // itself included
  Stack stack;
};
using OperationPtr = std::shared_ptr<const Operation>;

// Bytes that an operation reads or writes. Of a tensor with gaps `sizes` and `strides` (in bytes) say which.
struct Access {
  const char* begin = nullptr;
  const char* end = nullptr;
  bool write = false;
  std::vector<int64_t> sizes = {}, strides = {};
  int64_t item = 0;

  bool dense() const { return sizes.empty(); }
  bool shares_a_byte(const Access& other) const;
};

// One for the process. The mutex is held during the first four calls, and by nobody who calls the others: text of a
// stack of Python waits for the GIL.
class Order {
 public:
  std::mutex mutex;
  Clock host;  // what any thread of the host has waited for: threads tell each other in ways that nobody sees

  void check(const OperationPtr& operation, const std::vector<Access>& accesses);
  // Accesses of a kernel become known while it runs. Until then nothing is forgotten.
  void kernel_queued() { ++kernels_; }
  void kernel_ended(const OperationPtr& operation, const std::vector<Access>& touched);
  // Accesses to [begin, end) up to operation `number` of a stream come before all that follows.
  void forget(const char* begin, const char* end, size_t stream, uint64_t number);

  void tell();  // reports what check() and kernel_ended() have found
  void report(const std::string& text);
  std::vector<std::string> reports(bool clear);

 private:
  int kernels_ = 0;  // queued, and not ended
  std::vector<std::function<std::string()>> found_;
};

Order& order();

}  // namespace standin
