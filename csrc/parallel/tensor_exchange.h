// Layers that are cut among ranks (tensor parallelism): Shoeybi et al., "Megatron-LM" (2019). A layer that is cut along
// its outputs reads a tensor that all ranks have alike, a layer that is cut along its inputs gives a part of a sum.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "parallel/rank_nodes.h"

namespace ds::parallel {

class TensorExchange {
 public:
  // `overlap`: the all-reduce of an input's gradient runs while the gradient of the weight is computed.
  TensorExchange(comm::CommunicatorPtr ranks, bool overlap) : ranks_(std::move(ranks)), overlap_(overlap) {}

  // `input`, which all ranks have alike: its gradient is the sum over the ranks. Layers that read one tensor one after
  // the other share one all-reduce in backward.
  at::Tensor copy_in(const at::Tensor& input);
  // The sum over the ranks of `part`; its gradient is that of each part.
  at::Tensor sum_out(const at::Tensor& part);
  // sum_out() that runs beside what is computed until its wait().
  PendingSum start_sum(const at::Tensor& part) const { return {ranks_, part}; }
  // `input` for one layer alone. In backward the sum of its gradient runs beside the backward of what this thread has
  // computed since `place` (place_now(), gradient_node.h), as far as that does not depend on it.
  at::Tensor copy_in_beside(const at::Tensor& input, uint64_t place) const;
  // input * weight^T + bias of a layer that is cut along its outputs. With `overlap`, and where input and weight have
  // one type, each layer has an all-reduce of its own in backward.
  at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const c10::optional<at::Tensor>& bias);

  // Where each rank has a part of every sequence, `widths` tokens wide along `dim` (Korthikanti et al., "Reducing
  // Activation Recomputation in Large Transformer Models", 2022): the ranks' parts become the whole that layers read,
  // whose gradient is summed, as copy_in() does. copy_in() of that whole gives it as it is.
  at::Tensor gather_in(const at::Tensor& part, int64_t dim, const std::vector<int64_t>& widths);
  // This rank's tokens of the sum over the ranks of `part`.
  at::Tensor scatter_out(const at::Tensor& part, int64_t dim, const std::vector<int64_t>& widths);

  const comm::CommunicatorPtr& ranks() const { return ranks_; }

 private:
  // A tensor that came in, and what it became, until the layers that read it have come to sum_out() or scatter_out().
  struct Came {
    c10::weak_intrusive_ptr<at::TensorImpl> tensor{c10::intrusive_ptr<at::TensorImpl>()};
    uint32_t version = 0;
    at::Tensor became;

    bool is(const at::Tensor& input) const;
    void keep(const at::Tensor& input, at::Tensor made);
  };

  const comm::CommunicatorPtr ranks_;
  const bool overlap_;
  Came copied_, gathered_;  // the last ones
};

// The ranks' parts, which are `widths` wide along `dim`, joined there in rank order; and this rank's part of `whole`.
// Each is the gradient of the other.
at::Tensor gather_widths(const comm::CommunicatorPtr& ranks, const at::Tensor& part, int64_t dim,
                         const std::vector<int64_t>& widths);
at::Tensor split_widths(const comm::CommunicatorPtr& ranks, const at::Tensor& whole, int64_t dim,
                        const std::vector<int64_t>& widths);

// The ranks' parts as gather_widths() joins them, which the ranks use in different ways: the gradient of a part is this
// rank's part of the sum of the ranks' gradients. And this rank's part of the sum over the ranks of `whole`. Each is
// the gradient of the other.
at::Tensor gather_and_share(const comm::CommunicatorPtr& ranks, const at::Tensor& part, int64_t dim,
                            const std::vector<int64_t>& widths);
at::Tensor reduce_and_split(const comm::CommunicatorPtr& ranks, const at::Tensor& whole, int64_t dim,
                            const std::vector<int64_t>& widths);

// From now on the gradient of `param` is summed over `ranks` before anybody sees it. `param` is a leaf that all these
// ranks have alike, and each uses it for a part of the result.
void sum_gradients(const at::Tensor& param, const comm::CommunicatorPtr& ranks);

}  // namespace ds::parallel
