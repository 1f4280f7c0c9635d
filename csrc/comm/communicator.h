// A group of ranks that exchange tensors. Bodies: c10d (whatever torch offers), threads of one process (tests).
//
// Contract: every rank of the group issues the same calls in the same order. Tensors are contiguous and must not be
// touched until wait() has returned; on asynchronous devices wait() orders the current stream behind the collective
// instead of blocking the host. All ranks end with the same bits. Calls may come from any thread, one at a time.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

namespace ds::comm {

enum class ReduceOp { kSum, kMax, kMin };

class Work {
 public:
  virtual ~Work() = default;
  virtual void wait() = 0;  // idempotent; throws what the collective threw
};
using WorkPtr = std::shared_ptr<Work>;

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string name() const = 0;  // for messages and reports

  virtual WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op) = 0;
  virtual WorkPtr broadcast(const at::Tensor& tensor, int root) = 0;
  virtual void barrier() = 0;
};
using CommunicatorPtr = std::shared_ptr<Communicator>;

}  // namespace ds::comm
