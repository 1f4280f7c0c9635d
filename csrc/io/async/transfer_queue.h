// Transfers of spans by threads of one handle, waited for one by one or all together.
#pragma once
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/condition_variable.h"
#include "base/process.h"
#include "io/async/transfer.h"

namespace ds::io {

// Any thread at any time.
class TransferQueue {
 public:
  // One part of a request: `begin` is its offset in the span.
  using Part = std::function<void(uint64_t begin, uint64_t bytes)>;

  struct Request {
    Part move;                    // by several threads at a time, each with its part
    std::function<void()> after;  // once, by the last of them, when all parts went well; may be empty
    uint64_t offset = 0;          // in the file: parts are cut at its blocks
    uint64_t bytes = 0;
    std::shared_ptr<void> keep;  // until it ended
  };

  // An operation on its way. wait() returns when it has ended, and throws what went wrong.
  class Ticket {
   public:
    void wait() const;

   private:
    friend class TransferQueue;
    struct State;
    explicit Ticket(std::shared_ptr<State> state) : state_(std::move(state)) {}
    std::shared_ptr<State> state_;
  };

  explicit TransferQueue(int threads);
  ~TransferQueue();  // waits for what is on its way, and drops its errors
  TransferQueue(const TransferQueue&) = delete;
  TransferQueue& operator=(const TransferQueue&) = delete;

  int threads() const { return threads_; }

  // Returns when it has ended: by the calling thread alone where there is one thread or `alone`, else by the threads.
  // Throws what went wrong.
  void run(Request request, bool alone = false);

  // Returns at once. `counted`: wait() waits for it, too, and has its error.
  Ticket start(Request request, bool counted = true);

  // Waits for everything that was started with `counted`, returns how many operations ended since the last call.
  // Throws the first error, when all have ended; what is said of them next begins at 0 then.
  int64_t wait();

  int64_t pending() const;  // operations that were started with `counted` and that no wait() has told of

 private:
  using StatePtr = std::shared_ptr<Ticket::State>;
  struct Work {
    StatePtr operation;
    uint64_t begin, bytes;
  };
  void work();
  void start_threads();
  void end_part(const StatePtr& operation, std::exception_ptr error);
  StatePtr add(Request request, bool counted);

  const int threads_;
  const OwningProcess owner_;
  mutable std::mutex lock_;
  ConditionVariable added_, ended_;
  std::deque<Work> waiting_;
  int64_t counted_ = 0;       // started, not yet told of
  int64_t on_the_way_ = 0;    // of these
  std::exception_ptr error_;  // the first of them
  bool ending_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace ds::io
