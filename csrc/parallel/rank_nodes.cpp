#include "parallel/rank_nodes.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/ranges.h"
#include "comm/c10d_compat.h"

namespace ds::parallel {

namespace {

using comm::Verb;
using torch::autograd::variable_list;
using Counts = std::vector<int64_t>;

enum class Way : uint8_t { kGather, kScatter, kReduce, kShare, kExchange };

struct RankCall {
  comm::CommunicatorPtr ranks;
  Way way;
  int64_t dim = 0;
  Counts given = {}, taken = {};

  RankCall reversed() const {
    switch (way) {
      case Way::kGather: return {ranks, Way::kScatter, dim};
      case Way::kScatter: return {ranks, Way::kGather, dim};
      case Way::kReduce: return {ranks, Way::kShare};
      case Way::kShare: return {ranks, Way::kReduce};
      default: return {ranks, way, 0, taken, given};
    }
  }
};

int64_t row_numel(const at::Tensor& rows) {
  int64_t numel = 1;
  for (int64_t dim = 1; dim < rows.dim(); ++dim) numel *= rows.size(dim);
  return numel;
}

comm::Op rows_op(const at::Tensor& rows, const at::Tensor& out, const Counts& given, const Counts& taken) {
  comm::Op op{Verb::kAllToAll, rows, out, given, taken};
  for (Counts* counts : {&op.in_counts, &op.out_counts})
    for (int64_t& count : *counts) count *= row_numel(rows);
  return op;
}

at::Tensor rows_for(const at::Tensor& rows, const Counts& taken, const Counts& given) {
  if (rows.dim() == 0 || sum_of(given) != rows.size(0))
    fail(ErrorKind::kValue, "an exchange of ", sum_of(given), " rows got a tensor of shape [",
         c10::Join(", ", rows.sizes()), "]");
  std::vector<int64_t> sizes = rows.sizes().vec();
  sizes[0] = sum_of(taken);
  return at::empty(sizes, rows.options());
}

void run_now(const comm::CommunicatorPtr& ranks, comm::Op op) {
  op.wait = comm::Wait::kAtOnce;
  ranks->run(op)->wait();
}

// Without a gradient.
at::Tensor result_of(const RankCall& call, const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const int64_t n = call.ranks->size(), dim = call.dim < 0 ? call.dim + tensor.dim() : call.dim;
  if (n == 1 || call.way == Way::kShare) return tensor.detach();
  if (call.way == Way::kScatter) {
    const int64_t share = tensor.size(dim) / n;
    if (share * n != tensor.size(dim))
      fail(ErrorKind::kValue, "dimension ", dim, " of ", tensor.size(dim), " cannot be cut into ", n, " equal parts");
    return tensor.narrow(dim, share * call.ranks->rank(), share).contiguous();
  }
  const at::Tensor mine = tensor.contiguous();
  if (call.way == Way::kReduce) {
    const at::Tensor sum = mine.is_same(tensor) ? mine.clone() : mine;
    run_now(call.ranks, {Verb::kAllReduce, {}, sum});
    return sum;
  }
  if (call.way == Way::kExchange) {
    const at::Tensor out = rows_for(mine, call.taken, call.given);
    run_now(call.ranks, rows_op(mine, out, call.given, call.taken));
    return out;
  }
  std::vector<int64_t> sizes = mine.sizes().vec();
  sizes.insert(sizes.begin(), n);
  const at::Tensor all = at::empty(sizes, mine.options());
  run_now(call.ranks, {Verb::kAllGather, mine, all});
  return dim == 0 ? all.flatten(0, 1) : at::cat(all.unbind(0), dim);
}

bool needs_grad(const at::Tensor& tensor) { return c10::GradMode::is_enabled() && tensor.requires_grad(); }

// All ranks take part in a backward pass, also one whose result has no gradient.
at::Tensor there_or_zeros(torch::autograd::Node& node, const variable_list& grads) {
  return grads[0].defined() ? grads[0] : node.input_metadata(0).zeros_like();
}

at::Tensor apply(const RankCall& call, const at::Tensor& tensor);

class RankNode : public torch::autograd::Node {
 public:
  RankNode(torch::autograd::edge_list&& edges, RankCall back) : Node(std::move(edges)), back_(std::move(back)) {}

  std::string name() const override {
    constexpr const char* kNames[] = {"ScatterOverRanks", "GatherOverRanks", "ShareOverRanks", "ReduceOverRanks",
                                      "ExchangeRows"};
    return std::string(kNames[static_cast<size_t>(back_.way)]) + "Backward";
  }
  variable_list apply(variable_list&& grads) override { return {parallel::apply(back_, there_or_zeros(*this, grads))}; }

 private:
  const RankCall back_;
};

at::Tensor apply(const RankCall& call, const at::Tensor& tensor) {
  at::Tensor result = result_of(call, tensor);
  if (needs_grad(tensor))
    torch::autograd::set_history(
        result, comm::compat::make_node<RankNode>(torch::autograd::collect_next_edges(tensor), call.reversed()));
  return result;
}

}  // namespace

at::Tensor gather(const comm::CommunicatorPtr& ranks, const at::Tensor& part, int64_t dim) {
  return apply({ranks, Way::kGather, dim}, part);
}
at::Tensor scatter(const comm::CommunicatorPtr& ranks, const at::Tensor& whole, int64_t dim) {
  return apply({ranks, Way::kScatter, dim}, whole);
}
at::Tensor reduce(const comm::CommunicatorPtr& ranks, const at::Tensor& tensor) {
  return apply({ranks, Way::kReduce}, tensor);
}
at::Tensor share(const comm::CommunicatorPtr& ranks, const at::Tensor& tensor) {
  return apply({ranks, Way::kShare}, tensor);
}
at::Tensor exchange_rows(const comm::CommunicatorPtr& ranks, const at::Tensor& rows, std::vector<int64_t> given,
                         std::vector<int64_t> taken) {
  return apply({ranks, Way::kExchange, 0, std::move(given), std::move(taken)}, rows);
}

// ---- in two calls ---------------------------------------------------------------------------------------------------
class RowsSent : public torch::autograd::Node {
 public:
  RowsSent(torch::autograd::edge_list&& edges, std::shared_ptr<RowExchange> exchange)
      : Node(std::move(edges)), exchange_(std::move(exchange)) {}
  std::string name() const override { return "RowsSentBackward"; }
  variable_list apply(variable_list&&) override {  // what it gets is a placeholder
    exchange_->finish();
    return {std::move(exchange_->on_back_)};
  }

 private:
  const std::shared_ptr<RowExchange> exchange_;
};

class RowsArrived : public torch::autograd::Node {
 public:
  RowsArrived(torch::autograd::edge_list&& edges, std::shared_ptr<RowExchange> exchange)
      : Node(std::move(edges)), exchange_(std::move(exchange)) {}
  std::string name() const override { return "RowsArrivedBackward"; }
  variable_list apply(variable_list&& grads) override {
    const at::Tensor grad = there_or_zeros(*this, grads);
    exchange_->on_back_ = exchange_->begin(grad, exchange_->taken_, exchange_->given_);
    return {grad};
  }

 private:
  const std::shared_ptr<RowExchange> exchange_;
};

RowExchange::RowExchange(comm::CommunicatorPtr ranks, std::vector<int64_t> given, std::vector<int64_t> taken,
                         std::string what, Told told)
    : ranks_(std::move(ranks)),
      given_(std::move(given)),
      taken_(std::move(taken)),
      what_(std::move(what)),
      told_(std::move(told)) {}

template <typename Call>
void RowExchange::explained(const Call& call) const {
  try {
    call();
  } catch (const std::exception& error) {
    const auto* ours = dynamic_cast<const Error*>(&error);
    if (ours && ours->kind() != ErrorKind::kRuntime) throw;
    fail(ErrorKind::kRuntime, what_, ": ", error.what());
  }
}

at::Tensor RowExchange::begin(const at::Tensor& rows, const std::vector<int64_t>& given,
                              const std::vector<int64_t>& taken) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  held_ = rows.contiguous();
  at::Tensor out = rows_for(held_, taken, given);
  comm::Op op = rows_op(held_, out, given, taken);
  op.wait = comm::Wait::kDetached;
  explained([&] { work_ = ranks_->run(op); });
  const int64_t crossing = sum_of(given) - given[static_cast<size_t>(ranks_->rank())];
  told_.started(crossing * row_numel(held_) * static_cast<int64_t>(held_.element_size()));
  return out;
}

void RowExchange::finish() {
  const Clock::time_point since = Clock::now();
  explained([&] { work_->wait(); });
  work_.reset();
  held_ = at::Tensor();
  told_.waited(std::chrono::duration<double>(Clock::now() - since).count());
}

at::Tensor RowExchange::start(const at::Tensor& rows) {
  at::Tensor out = begin(rows, given_, taken_);
  if (needs_grad(rows))
    torch::autograd::set_history(
        out, comm::compat::make_node<RowsSent>(torch::autograd::collect_next_edges(rows), shared_from_this()));
  return out;
}

at::Tensor RowExchange::wait(const at::Tensor& arriving) {
  finish();
  at::Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    out = arriving.detach();
  }
  if (needs_grad(arriving))
    torch::autograd::set_history(
        out, comm::compat::make_node<RowsArrived>(torch::autograd::collect_next_edges(arriving), shared_from_this()));
  return out;
}

}  // namespace ds::parallel
