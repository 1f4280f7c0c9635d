#include "zero/gradients/sparse_rows.h"

#include <ATen/Functions.h>

#include <algorithm>

namespace ds::zero {

at::Tensor touched_rows(const at::Tensor& grad) {
  const at::Tensor rows = grad.reshape({grad.size(0), -1});
  return rows.ne(0).any(1).nonzero().flatten();
}

at::Tensor as_sparse(const at::Tensor& grad) {
  const at::Tensor rows = touched_rows(grad);
  return at::_sparse_coo_tensor_unsafe(rows.unsqueeze(0), grad.index_select(0, rows), grad.sizes())._coalesced_(true);
}

void reduce_rows(comm::Communicator& communicator, const at::Tensor& grad, float scale, at::ScalarType wire,
                 const std::string& tag) {
  const int64_t ranks = communicator.size(), rank = communicator.rank();
  if (grad.numel() == 0) return;
  at::Tensor mine, counts = at::zeros({ranks}, grad.options().dtype(at::kLong));
  mine = touched_rows(grad);
  counts.select(0, rank).fill_(mine.numel());
  communicator.all_gather(counts.narrow(0, rank, 1), counts, tag)->wait();
  counts = counts.to(at::kCPU);
  const int64_t* count = counts.data_ptr<int64_t>();
  const int64_t most = *std::max_element(count, count + ranks);
  if (most == 0) return;
  // Received here: rows of all ranks; by an all-reduce twice the whole gradient.
  if (!grad.is_contiguous() || most * ranks >= 2 * grad.size(0)) {
    const at::Tensor sent = grad.to(wire).contiguous();
    communicator.all_reduce(sent, comm::ReduceOp::kSum, tag)->wait();
    grad.copy_(sent);
    grad.mul_(scale);
    return;
  }
  const at::Tensor flat = grad.view({grad.size(0), -1});
  const at::Tensor rows = at::zeros({ranks, most}, mine.options());
  const at::Tensor values = at::zeros({ranks, most, flat.size(1)}, grad.options().dtype(wire));
  rows.select(0, rank).narrow(0, 0, mine.numel()).copy_(mine);
  values.select(0, rank).narrow(0, 0, mine.numel()).copy_(flat.index_select(0, mine));
  communicator.all_gather(rows.select(0, rank), rows, tag)->wait();
  communicator.all_gather(values.select(0, rank), values, tag)->wait();
  flat.index_fill_(0, mine, 0);
  for (int64_t from = 0; from < ranks; ++from)
    flat.index_add_(0, rows.select(0, from).narrow(0, 0, count[from]),
                    values.select(0, from).narrow(0, 0, count[from]).to(flat.scalar_type()).mul(scale));
}

}  // namespace ds::zero
