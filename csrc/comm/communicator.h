// A group of ranks that exchange tensors. Bodies: c10d (whatever torch offers), threads of one process (tests).
//
// Contract: every rank of the group issues the same calls in the same order. Tensors are contiguous and must not be
// touched until wait() has returned; on asynchronous devices wait() orders the current stream behind the collective
// instead of blocking the host. All ranks end with the same bits. Calls may come from any thread, one at a time.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/peer_memory.h"

namespace ds::comm {

enum class ReduceOp { kSum, kMax, kMin };

class Work {
 public:
  virtual ~Work() = default;
  virtual void wait() = 0;                // idempotent; throws what the collective threw
  virtual bool ready() { return false; }  // true: wait() will not block the host; false: unknown
};
using WorkPtr = std::shared_ptr<Work>;

// One finished call, as a log of operations shows it.
struct LoggedCall {
  const char* op;  // all_reduce, broadcast, reduce_scatter, all_gather
  int64_t bytes;   // of the largest tensor of the call: what all ranks together hold of it, once
  double ms;       // from the call to its end on this rank
};

// What this rank has sent since the last reset, as the algorithms of the textbook count it: all_reduce of n elements
// 2n(N-1)/N, reduce_scatter and all_gather of n elements over all ranks n(N-1)/N, broadcast n.
struct Traffic {
  int64_t calls = 0;
  int64_t elements = 0;
  int64_t bytes = 0;
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string name() const = 0;  // for messages and reports

  // `tag`: what it is for, a parameter's name as a rule, equal on all ranks; for messages when ranks do not meet.
  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op, const std::string& tag = {});
  WorkPtr broadcast(const at::Tensor& tensor, int root, const std::string& tag = {});
  // `output` becomes the sum over ranks of row number rank() of `input`, which has size() rows of output.numel()
  // elements. Summed in rank order, in fp32 where the input is narrower; `output` has input's dtype or fp32. It may be
  // that very row of `input`, else they do not overlap. The rest of `input` is left undefined.
  WorkPtr reduce_scatter(const at::Tensor& input, const at::Tensor& output, const std::string& tag = {});
  // Row r of `all`, which has size() rows of mine.numel() elements, becomes rank r's `mine`. `mine` may be this rank's
  // row of `all`.
  WorkPtr all_gather(const at::Tensor& mine, const at::Tensor& all, const std::string& tag = {});
  virtual void barrier() = 0;
  // Host memory of `bytes` on every rank that all ranks can read, or null on all of them where there is no such thing.
  // Collective, with tensors in host memory.
  virtual PeerMemoryPtr peer_memory(int64_t bytes) = 0;
  // A communicator of these ranks alone (ascending, this one among them), over what carries this one. Only they call
  // it. Its tensors are in host memory. Null where there is no such thing.
  virtual std::shared_ptr<Communicator> among(const std::vector<int>& ranks);
  // The process is about to end, or nobody needs it: lets go of what it is carried by, and cannot be used any more.
  virtual void leave() {}

  const Traffic& traffic() const { return traffic_; }
  void reset_traffic() { traffic_ = {}; }

  // While logging, every call waits for its end, so that its time is its own: nothing overlaps.
  void log_calls(bool on) { logging_ = on; }
  std::vector<LoggedCall> take_log();  // calls since the last take

 protected:
  using Tag = const std::string&;
  virtual WorkPtr start_all_reduce(const at::Tensor& tensor, ReduceOp op, Tag tag) = 0;
  virtual WorkPtr start_broadcast(const at::Tensor& tensor, int root, Tag tag) = 0;
  virtual WorkPtr start_reduce_scatter(const at::Tensor& input, const at::Tensor& output, Tag tag) = 0;
  virtual WorkPtr start_all_gather(const at::Tensor& mine, const at::Tensor& all, Tag tag) = 0;

 private:
  void count(int64_t elements, const at::Tensor& tensor);
  template <typename Start>
  WorkPtr run(const char* op, const at::Tensor& largest, const Start& start);

  Traffic traffic_;
  bool logging_ = false;
  std::vector<LoggedCall> log_;
};
using CommunicatorPtr = std::shared_ptr<Communicator>;

}  // namespace ds::comm
