#include "comm/calls/numbers.h"

#include <ATen/Functions.h>

namespace ds::comm {

void sum_numbers(Communicator& ranks, const at::Tensor& numbers, const c10::Device& computes, Communicator::Tag tag) {
  if (ranks.size() == 1) return;
  const at::Tensor sent = numbers.to(ranks.device_for_numbers(computes));
  ranks.all_reduce(sent, ReduceOp::kSum, tag)->wait();
  if (!sent.is_same(numbers)) at::Tensor(numbers).copy_(sent);
}

at::Tensor gather_numbers(Communicator& ranks, const at::Tensor& own, const c10::Device& computes,
                          Communicator::Tag tag) {
  const at::Tensor sent = own.contiguous().to(ranks.device_for_numbers(computes));
  const at::Tensor all = at::empty({ranks.size(), own.numel()}, sent.options());
  ranks.all_gather(sent, all, tag)->wait();
  return all.to(at::kCPU);
}

}  // namespace ds::comm
