// A group of ranks that exchange tensors. Transports (comm/transports): threads of one process, shared memory of one
// host, a process group of torch, NCCL, several hosts; each carries the verbs that it is good at, and compose.cpp makes
// the others of those. Decorators (comm/decorators) add to any of them what is no transport's business.
//
// Contract: every rank of the group issues the same calls in the same order (send and recv: the two ranks that take
// part). Tensors are contiguous and must not be touched until wait() has returned; on asynchronous devices wait()
// orders the current stream behind the collective instead of blocking the host. All ranks end with the same bits. Calls
// may come from any thread, one at a time.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "comm/calls/op.h"
#include "comm/shared_memory/peer_memory.h"
#include "comm/calls/work.h"

namespace ds::comm {

class ScratchPool;

// The traffic of this rank since the last reset, counted as textbook algorithms send it: all_reduce of n elements
// 2n(N-1)/N; reduce_scatter, all_gather and all_to_all of n elements over all ranks n(N-1)/N; broadcast and reduce n;
// gather, scatter and send what this rank gives away. Barriers do not count.
struct Traffic {
  int64_t calls = 0;
  int64_t elements = 0;
  int64_t bytes = 0;
};

class Communicator {
 public:
  using Tag = const std::string&;

  Communicator();
  virtual ~Communicator();
  Communicator(const Communicator&) = delete;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string name() const = 0;  // for messages and reports
  // Whether start() can do it; else compose.cpp makes it of what start() can. Equal on all ranks for calls that meet.
  virtual bool carries(const Op& op) const = 0;

  // Fails where counts or sizes do not fit together, before anything is sent.
  WorkPtr run(const Op& op);
  // Whether a call with several pairs of tensors (Op::more) costs no more than one. Else they are calls of their own.
  virtual bool groups() const { return false; }
  // Sends and receives as one launch, between any ranks and in any order: none of them waits for another.
  virtual WorkPtr run_all(const std::vector<Op>& ops);

  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op, Tag tag = {});
  WorkPtr reduce(const at::Tensor& tensor, ReduceOp op, int root, Tag tag = {});
  WorkPtr broadcast(const at::Tensor& tensor, int root, Tag tag = {});
  // `output` becomes the sum over ranks of row number rank() of `input`, which has size() rows of output.numel()
  // elements. Summed in rank order, in fp32 where the input is narrower.
  WorkPtr reduce_scatter(const at::Tensor& input, const at::Tensor& output, Tag tag = {});
  // Row r of `all`, which has size() rows of mine.numel() elements, becomes rank r's `mine`.
  WorkPtr all_gather(const at::Tensor& mine, const at::Tensor& all, Tag tag = {});
  // The same for each pair, as one launch where groups() is true.
  WorkPtr all_gather(std::vector<TensorPair> pairs, Tag tag = {});
  WorkPtr reduce_scatter(std::vector<TensorPair> pairs, Tag tag = {});
  WorkPtr all_to_all(const at::Tensor& input, const at::Tensor& output, Tag tag = {});
  WorkPtr all_to_all(const at::Tensor& input, std::vector<int64_t> input_counts, const at::Tensor& output,
                     std::vector<int64_t> output_counts, Tag tag = {});
  WorkPtr gather(const at::Tensor& mine, const at::Tensor& all, int root, Tag tag = {});
  WorkPtr scatter(const at::Tensor& all, const at::Tensor& mine, int root, Tag tag = {});
  WorkPtr send(const at::Tensor& tensor, int to, Tag tag = {});
  WorkPtr recv(const at::Tensor& tensor, int from, Tag tag = {});
  void barrier();

  // Host memory of `bytes` on every rank that all ranks can read, or null on all of them where there is no such thing.
  // Collective, with tensors in host memory.
  virtual PeerMemoryPtr peer_memory(int64_t bytes) = 0;
  // A communicator of these ranks alone (ascending, this one among them), over the same transport. Only they call it.
  // Its tensors are in host memory. Null where the transport has none.
  virtual std::shared_ptr<Communicator> among(const std::vector<int>& ranks);
  // False: tensors of that device travel as copies in host memory. Equal on all ranks.
  virtual bool reaches(const c10::Device&) const { return true; }
  // Whether tensors in host memory travel without a device. Equal on all ranks.
  virtual bool carries_host_memory() const { return true; }
  // The device on which numbers of the host travel to other ranks, for a caller whose tensors are on `computes`: the
  // CPU where that is possible, so that hosts wait for each other and not for their devices.
  c10::Device device_for_numbers(const c10::Device& computes) const;
  // Releases the transport, at the end of the process or when the communicator is not needed; no calls after it.
  virtual void leave() {}
  // The longest wait of a rank for others, where the transport bounds it itself.
  virtual void set_timeout(milliseconds) {}
  // Ends the calls under way, as far as the transport can, and makes further calls fail. From any thread.
  virtual void abort(const std::string& why) noexcept { (void)why; }
  // The communicator without decorators, for internal calls such as those by which ranks meet.
  virtual Communicator& bare() { return *this; }

  const Traffic& traffic() const { return traffic_; }
  void reset_traffic() { traffic_ = {}; }

 protected:
  virtual WorkPtr start(const Op& op) = 0;  // that it carries
  // For compose.cpp. True: a verb that the transport does not carry is made of sends and receives between all pairs (a
  // network). False: it is made of collectives.
  virtual bool pairwise() const { return false; }
  // Whether start() does Op::parts; else they are packed, and it gets what is packed.
  virtual bool carries_parts() const { return false; }
  // The sends and receives of one collective, which every rank makes at the same position of its sequence of calls.
  virtual WorkPtr exchange(const std::vector<Op>& ops) { return run_all(ops); }

 private:
  friend class Composer;
  WorkPtr launch(const Op& op);  // starts or composes it; neither checked nor counted
  void check(const Op& op) const;
  void count(const Op& op);

  Traffic traffic_;
  std::shared_ptr<ScratchPool> pool_;
};
using CommunicatorPtr = std::shared_ptr<Communicator>;

}  // namespace ds::comm
