// Verbs that a transport does not carry, made of those that it does. A transport needs kSend and kRecv, or kAllToAll
// with counts: everything else can be made of either.
#pragma once
#include <mutex>
#include <vector>

#include "comm/communicator.h"

namespace ds::comm {

// On a device that the transport does not reach, through copies in host memory. Where a composition has several steps,
// those before the last have ended on return: wait() starts nothing, since ranks may wait in different orders. Sums are
// formed in rank order, in fp32 where the elements are 16-bit floats, and rounded once. kNotImplemented, naming the
// transport, where it carries neither.
WorkPtr compose(Communicator& communicator, const Op& op);

// `whole` as n parts that follow each other, of `counts` elements each or, where there are none, equal ones.
std::vector<at::Tensor> parts_of(const at::Tensor& whole, const std::vector<int64_t>& counts, int n);

// out = parts[0] op parts[1] ..., elementwise, in this order; see rank_order_reduction.h. Any device.
void reduce_parts(const at::Tensor& out, const std::vector<at::Tensor>& parts, ReduceOp op);

// Host memory that transfers land in, kept between calls: the first touch of fresh pages costs more than the transfer.
class ScratchPool {
 public:
  at::Tensor take(int64_t numel, const at::TensorOptions& options);
  void give(const at::Tensor& tensor);  // of take(); elsewhere than in host memory torch's allocator keeps it

 private:
  static constexpr size_t kMost = 16;
  std::mutex mutex_;
  std::vector<at::Tensor> free_;
};

}  // namespace ds::comm
