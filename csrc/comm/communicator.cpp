#include "comm/communicator.h"

#include "base/error.h"

namespace ds::comm {

void Communicator::count(int64_t elements, const at::Tensor& tensor) {
  ++traffic_.calls;
  traffic_.elements += elements;
  traffic_.bytes += elements * static_cast<int64_t>(tensor.element_size());
}

WorkPtr Communicator::all_reduce(const at::Tensor& tensor, ReduceOp op) {
  count(2 * tensor.numel() * (size() - 1) / size(), tensor);
  return start_all_reduce(tensor, op);
}

WorkPtr Communicator::broadcast(const at::Tensor& tensor, int root) {
  count(size() > 1 ? tensor.numel() : 0, tensor);
  return start_broadcast(tensor, root);
}

WorkPtr Communicator::reduce_scatter(const at::Tensor& input, const at::Tensor& output) {
  if (input.numel() != output.numel() * size())
    fail(ErrorKind::kValue, "reduce_scatter: ", input.numel(), " elements for ", size(), " rows of ", output.numel());
  count(input.numel() * (size() - 1) / size(), input);
  return start_reduce_scatter(input, output);
}

WorkPtr Communicator::all_gather(const at::Tensor& mine, const at::Tensor& all) {
  if (all.numel() != mine.numel() * size())
    fail(ErrorKind::kValue, "all_gather: ", all.numel(), " elements for ", size(), " rows of ", mine.numel());
  count(all.numel() * (size() - 1) / size(), all);
  return start_all_gather(mine, all);
}

}  // namespace ds::comm
