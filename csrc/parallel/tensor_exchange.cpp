#include "parallel/tensor_exchange.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/ranges.h"
#include "parallel/gradient_node.h"
#include "parallel/rank_nodes.h"

namespace ds::parallel {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Widths = std::vector<int64_t>;

struct HeldRanks : torch::CustomClassHolder {
  explicit HeldRanks(comm::CommunicatorPtr ranks) : ranks(std::move(ranks)) {}
  const comm::CommunicatorPtr ranks;
};

// All leading dimensions as one.
at::Tensor rows_of(const at::Tensor& tensor) { return tensor.dim() == 1 ? tensor.unsqueeze(0) : tensor.flatten(0, -2); }

struct ColumnLinearOfRanks : torch::autograd::Function<ColumnLinearOfRanks> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const at::Tensor& weight,
                            const c10::optional<at::Tensor>& bias, const comm::CommunicatorPtr& ranks) {
    ctx->save_for_backward({input, weight});
    ctx->saved_data["ranks"] = c10::IValue::make_capsule(c10::make_intrusive<HeldRanks>(ranks));
    ctx->saved_data["has_bias"] = bias.has_value();
    return at::linear(input, weight, bias);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto held = c10::static_intrusive_pointer_cast<HeldRanks>(ctx->saved_data["ranks"].toCapsule());
    const at::Tensor rows = rows_of(grads[0]);
    variable_list made(4);
    comm::WorkPtr work;
    if (ctx->needs_input_grad(0)) {
      made[0] = at::matmul(grads[0], saved[1]);
      comm::Op op{comm::Verb::kAllReduce, {}, made[0]};
      op.wait = comm::Wait::kDetached;
      work = held->ranks->run(op);
    }
    if (ctx->needs_input_grad(1)) made[1] = at::matmul(rows.t(), rows_of(saved[0]));
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2)) made[2] = rows.sum(0);
    if (work) work->wait();
    return made;
  }
};

Widths::value_type start_of(const Widths& widths, int rank) {
  Widths::value_type start = 0;
  for (int r = 0; r < rank; ++r) start += widths[static_cast<size_t>(r)];
  return start;
}

void check(const comm::CommunicatorPtr& ranks, const Widths& widths, int64_t found, int64_t wanted) {
  if (static_cast<int>(widths.size()) != ranks->size() || found != wanted)
    fail(ErrorKind::kValue, "a tensor that is ", found, " wide does not fit the widths [", c10::Join(", ", widths),
         "] of ", ranks->size(), " ranks");
}

// The ranks' parts side by side, without a gradient.
at::Tensor joined(const comm::CommunicatorPtr& ranks, const at::Tensor& part, int64_t dim, const Widths& widths) {
  check(ranks, widths, part.size(dim), widths[static_cast<size_t>(ranks->rank())]);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const int64_t widest = *std::max_element(widths.begin(), widths.end());
  Widths shape = part.sizes().vec();
  shape[static_cast<size_t>(dim)] = widest - part.size(dim);
  const at::Tensor padded = at::cat({part, at::zeros(shape, part.options())}, dim).contiguous();
  shape[static_cast<size_t>(dim)] = widest;
  shape.insert(shape.begin(), ranks->size());
  const at::Tensor all = at::empty(shape, part.options());
  run_now(ranks, {comm::Verb::kAllGather, padded, all});
  std::vector<at::Tensor> parts;
  parts.reserve(widths.size());
  for (int rank = 0; rank < ranks->size(); ++rank)
    parts.push_back(all.select(0, rank).narrow(dim, 0, widths[static_cast<size_t>(rank)]));
  return at::cat(parts, dim);
}

}  // namespace

bool TensorExchange::Came::is(const at::Tensor& input) const {
  const auto before = tensor.lock();
  return before && before.get() == input.unsafeGetTensorImpl() && input._version() == version && became.defined();
}

void TensorExchange::Came::keep(const at::Tensor& input, at::Tensor made) {
  became = std::move(made);
  tensor = c10::weak_intrusive_ptr<at::TensorImpl>(input.getIntrusivePtr());
  version = static_cast<uint32_t>(input._version());
}

at::Tensor TensorExchange::copy_in(const at::Tensor& input) {
  if (gathered_.became.is_same(input)) return input;
  if (ranks_->size() == 1 || !c10::GradMode::is_enabled() || !input.requires_grad()) return input;
  if (!copied_.is(input)) copied_.keep(input, share(ranks_, input));
  return copied_.became;
}

at::Tensor TensorExchange::gather_in(const at::Tensor& part, int64_t dim, const Widths& widths) {
  if (!gathered_.is(part)) gathered_.keep(part, gather_and_share(ranks_, part, dim, widths));
  return gathered_.became;
}

at::Tensor TensorExchange::sum_out(const at::Tensor& part) {
  copied_.became = at::Tensor();
  return reduce(ranks_, part);
}

at::Tensor TensorExchange::scatter_out(const at::Tensor& part, int64_t dim, const Widths& widths) {
  copied_.became = gathered_.became = at::Tensor();
  return reduce_and_split(ranks_, part, dim, widths);
}

at::Tensor TensorExchange::copy_in_beside(const at::Tensor& input, uint64_t place) const {
  if (ranks_->size() == 1) return input;
  const auto sum = std::make_shared<c10::optional<PendingSum>>();  // of the gradient, between the two nodes
  const auto arrived = [sum](const at::Tensor&) {
    PendingSum pending = std::move(**sum);
    sum->reset();
    return pending.wait();
  };
  const auto sent = [sum, ranks = ranks_](const at::Tensor& grad) {
    sum->emplace(ranks, grad);
    return grad;
  };
  const at::Tensor waits = with_gradient("GradientArrivedBackward", input, alias_of(input), arrived, place);
  return with_gradient("GradientSentBackward", waits, alias_of(waits), sent);
}

at::Tensor TensorExchange::linear(const at::Tensor& input, const at::Tensor& weight,
                                  const c10::optional<at::Tensor>& bias) {
  const bool overlaps = overlap_ && ranks_->size() > 1 && c10::GradMode::is_enabled() && input.requires_grad() &&
                        input.scalar_type() == weight.scalar_type();
  return overlaps ? ColumnLinearOfRanks::apply(input, weight, bias, ranks_) : at::linear(copy_in(input), weight, bias);
}

at::Tensor gather_widths(const comm::CommunicatorPtr& ranks, const at::Tensor& part, int64_t dim,
                         const Widths& widths) {
  if (dim < 0) dim += part.dim();
  return with_gradient("GatherWidthsBackward", part, joined(ranks, part, dim, widths),
                       [=](const at::Tensor& grad) { return split_widths(ranks, grad, dim, widths); });
}

at::Tensor gather_and_share(const comm::CommunicatorPtr& ranks, const at::Tensor& part, int64_t dim,
                            const Widths& widths) {
  if (dim < 0) dim += part.dim();
  return with_gradient("GatherAndShareBackward", part, joined(ranks, part, dim, widths),
                       [=](const at::Tensor& grad) { return reduce_and_split(ranks, grad, dim, widths); });
}

at::Tensor reduce_and_split(const comm::CommunicatorPtr& ranks, const at::Tensor& whole, int64_t dim,
                            const Widths& widths) {
  if (dim < 0) dim += whole.dim();
  check(ranks, widths, whole.size(dim), sum_of(widths));
  at::Tensor own;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const int64_t width = widths[static_cast<size_t>(ranks->rank())];
    Widths shape = whole.sizes().vec();
    shape[static_cast<size_t>(dim)] = *std::max_element(widths.begin(), widths.end());
    const at::Tensor mine = at::empty(shape, whole.options());
    shape.insert(shape.begin(), ranks->size());
    const at::Tensor all = at::zeros(shape, whole.options());
    const std::vector<at::Tensor> parts = whole.split_with_sizes(widths, dim);
    for (size_t rank = 0; rank < widths.size(); ++rank)
      all[static_cast<int64_t>(rank)].narrow(dim, 0, widths[rank]).copy_(parts[rank]);
    run_now(ranks, {comm::Verb::kReduceScatter, all, mine});
    own = mine.narrow(dim, 0, width).contiguous();
  }
  return with_gradient("ReduceAndSplitBackward", whole, std::move(own),
                       [=](const at::Tensor& grad) { return gather_and_share(ranks, grad, dim, widths); });
}

at::Tensor split_widths(const comm::CommunicatorPtr& ranks, const at::Tensor& whole, int64_t dim,
                        const Widths& widths) {
  check(ranks, widths, whole.size(dim), sum_of(widths));
  at::Tensor own;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    own = whole.narrow(dim, start_of(widths, ranks->rank()), widths[static_cast<size_t>(ranks->rank())]).clone();
  }
  return with_gradient("SplitWidthsBackward", whole, std::move(own),
                       [=](const at::Tensor& grad) { return gather_widths(ranks, grad, dim, widths); });
}

void sum_gradients(const at::Tensor& param, const comm::CommunicatorPtr& ranks) {
  if (ranks->size() == 1) return;
  const bool trains = param.requires_grad();
  param.set_requires_grad(true);  // a frozen parameter that trains later has the hook, too
  param.register_hook([ranks](const at::Tensor& grad) { return reduce(ranks, grad); });
  param.set_requires_grad(trains);
}

}  // namespace ds::parallel
