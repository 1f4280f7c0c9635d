#include "parallel/rank_nodes.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/ranges.h"
#include "parallel/gradient_node.h"

namespace ds::parallel {

namespace {

using comm::Verb;
using Counts = std::vector<int64_t>;
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

int64_t row_numel(const at::Tensor& rows) {
  int64_t numel = 1;
  for (int64_t dim = 1; dim < rows.dim(); ++dim) numel *= rows.size(dim);
  return numel;
}

// The call that exchanges contiguous `rows`, with memory for what arrives.
comm::Op exchange_of(const at::Tensor& rows, Counts given, Counts taken) {
  if (rows.dim() == 0 || sum_of(given) != rows.size(0))
    fail(ErrorKind::kValue, "an exchange of ", sum_of(given), " rows got a tensor of shape [",
         c10::Join(", ", rows.sizes()), "]");
  Counts sizes = rows.sizes().vec();
  sizes[0] = sum_of(taken);
  for (Counts* counts : {&given, &taken})
    for (int64_t& count : *counts) count *= row_numel(rows);
  comm::Op call{Verb::kAllToAll, rows, at::empty(sizes, rows.options()), std::move(given), std::move(taken)};
  call.logged_as = "all_to_all_single";  // as scripts call it, and filter the log by it
  return call;
}

at::Tensor joined(const comm::CommunicatorPtr& ranks, const at::Tensor& part, int64_t dim) {
  const BelowAutograd below_autograd;
  Counts sizes = part.sizes().vec();
  sizes.insert(sizes.begin(), ranks->size());
  const at::Tensor all = at::empty(sizes, part.options());
  run_now(ranks, {Verb::kAllGather, part.contiguous(), all});
  return dim == 0 ? all.flatten(0, 1) : at::cat(all.unbind(0), dim);
}

at::Tensor own_part(const comm::CommunicatorPtr& ranks, const at::Tensor& whole, int64_t dim) {
  const BelowAutograd below_autograd;
  const int64_t n = ranks->size(), share = whole.size(dim) / n;
  if (share * n != whole.size(dim))
    fail(ErrorKind::kValue, "dimension ", dim, " of ", whole.size(dim), " cannot be cut into ", n, " equal parts");
  return whole.narrow(dim, share * ranks->rank(), share).clone(at::MemoryFormat::Contiguous);
}

at::Tensor sum_over(const comm::CommunicatorPtr& ranks, const at::Tensor& tensor) {
  const BelowAutograd below_autograd;
  at::Tensor sum = tensor.clone(at::MemoryFormat::Contiguous);
  run_now(ranks, {Verb::kAllReduce, {}, sum});
  return sum;
}

}  // namespace

void run_now(const comm::CommunicatorPtr& ranks, comm::Op op) {
  op.wait = comm::Wait::kAtOnce;
  ranks->run(op)->wait();
}

at::Tensor gather(const comm::CommunicatorPtr& ranks, const at::Tensor& part, int64_t dim) {
  if (ranks->size() == 1) return part;
  return with_gradient("GatherOverRanksBackward", part, joined(ranks, part, dim),
                       [=](const at::Tensor& grad) { return scatter(ranks, grad, dim); });
}

at::Tensor scatter(const comm::CommunicatorPtr& ranks, const at::Tensor& whole, int64_t dim) {
  if (ranks->size() == 1) return whole;
  return with_gradient("ScatterOverRanksBackward", whole, own_part(ranks, whole, dim),
                       [=](const at::Tensor& grad) { return gather(ranks, grad, dim); });
}

at::Tensor reduce(const comm::CommunicatorPtr& ranks, const at::Tensor& tensor) {
  if (ranks->size() == 1) return tensor;
  return with_gradient("ReduceOverRanksBackward", tensor, sum_over(ranks, tensor),
                       [=](const at::Tensor& grad) { return share(ranks, grad); });
}

at::Tensor share(const comm::CommunicatorPtr& ranks, const at::Tensor& tensor) {
  if (ranks->size() == 1) return tensor;
  return with_gradient("ShareOverRanksBackward", tensor, alias_of(tensor),
                       [=](const at::Tensor& grad) { return reduce(ranks, grad); });
}

at::Tensor exchange_rows(const comm::CommunicatorPtr& ranks, const at::Tensor& rows, const Counts& given,
                         const Counts& taken) {
  at::Tensor arrived;
  {
    const BelowAutograd below_autograd;
    const comm::Op op = exchange_of(rows.contiguous(), given, taken);
    run_now(ranks, op);
    arrived = op.out;
  }
  return with_gradient("ExchangeRowsBackward", rows, std::move(arrived),
                       [=](const at::Tensor& grad) { return exchange_rows(ranks, grad, taken, given); });
}

// ---- in two calls ---------------------------------------------------------------------------------------------------
PendingSum::PendingSum(const comm::CommunicatorPtr& ranks, const at::Tensor& part) : sum_(part) {
  if (ranks->size() == 1) return;
  at::Tensor sum;
  {
    const BelowAutograd below_autograd;
    sum = part.clone(at::MemoryFormat::Contiguous);
    comm::Op op{Verb::kAllReduce, {}, sum};
    op.wait = comm::Wait::kDetached;
    work_ = ranks->run(op);
  }
  sum_ = with_gradient("ReduceOverRanksBackward", part, std::move(sum),
                       [=](const at::Tensor& grad) { return share(ranks, grad); });
}

at::Tensor PendingSum::wait() {
  if (!sum_.defined()) fail(ErrorKind::kRuntime, "wait() of a sum over ranks was called twice: keep what it returned");
  if (work_) work_->wait();
  work_.reset();
  return std::move(sum_);
}

RowExchange::RowExchange(comm::CommunicatorPtr ranks, Counts given, Counts taken, std::string what, Started started,
                         Waited waited)
    : ranks_(std::move(ranks)),
      given_(std::move(given)),
      taken_(std::move(taken)),
      what_(std::move(what)),
      started_(std::move(started)),
      waited_(std::move(waited)) {}

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

at::Tensor RowExchange::begin(const at::Tensor& rows, const Counts& given, const Counts& taken) {
  const BelowAutograd below_autograd;
  held_ = rows.contiguous();
  comm::Op op = exchange_of(held_, given, taken);
  op.wait = comm::Wait::kDetached;
  explained([&] { work_ = ranks_->run(op); });
  const int64_t crossing = sum_of(given) - given[static_cast<size_t>(ranks_->rank())];
  started_(crossing * row_numel(held_) * static_cast<int64_t>(held_.element_size()));
  return op.out;
}

void RowExchange::finish() {
  const Clock::time_point since = Clock::now();
  explained([&] { work_->wait(); });
  work_.reset();
  held_ = at::Tensor();
  waited_(std::chrono::duration<double>(Clock::now() - since).count());
}

at::Tensor RowExchange::start(const at::Tensor& rows) {
  return with_gradient("RowsSentBackward", rows, begin(rows, given_, taken_),
                       [self = shared_from_this()](const at::Tensor&) {  // the gradients arrive in on_back_
                         self->finish();
                         return std::move(self->on_back_);
                       });
}

at::Tensor RowExchange::wait(const at::Tensor& arriving) {
  finish();
  return with_gradient("RowsArrivedBackward", arriving, alias_of(arriving),
                       [self = shared_from_this()](const at::Tensor& grad) {
                         self->on_back_ = self->begin(grad, self->taken_, self->given_);
                         return grad;
                       });
}

}  // namespace ds::parallel
