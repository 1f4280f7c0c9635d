#include "parallel/vocab_softmax.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "base/error.h"
#include "parallel/rank_nodes.h"

namespace ds::parallel {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kBlock = int64_t{1} << 22;  // logits whose fp32 copies exist at the same time

// Calls `body` with the first row and the number of rows of each block of `logits`.
template <typename Body>
void by_blocks(const at::Tensor& logits, const Body& body) {
  const int64_t rows = logits.size(0), each = std::max<int64_t>(1, kBlock / std::max<int64_t>(1, logits.size(1)));
  for (int64_t first = 0; first < rows; first += each) body(first, std::min(each, rows - first));
}

at::ScalarType type_of_sums(const at::Tensor& logits) {
  return logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

void all_reduce(const comm::CommunicatorPtr& ranks, const at::Tensor& tensor, comm::ReduceOp how) {
  if (ranks->size() == 1) return;
  comm::Op op{comm::Verb::kAllReduce, {}, tensor};
  op.reduce = how;
  run_now(ranks, op);
}

struct VocabSumsOfRanks : torch::autograd::Function<VocabSumsOfRanks> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& logits, const at::Tensor& targets,
                               const VocabSlice& slice, int64_t ignored, bool overwrite) {
    const int64_t rows = logits.size(0), width = slice.stop - slice.start;
    const auto type = type_of_sums(logits);
    const auto fp32 = logits.options().dtype(type);
    const at::Tensor own = at::full({rows}, -std::numeric_limits<float>::infinity(), fp32);
    const at::Tensor sums = at::zeros({4, rows}, fp32);  // of exponentials, targets, logits; how many ranks have it
    const at::Tensor here = targets.ge(slice.start).logical_and(targets.lt(slice.stop));
    const at::Tensor places = (targets - slice.start).masked_fill(here.logical_not(), 0);
    if (width > 0)
      by_blocks(logits, [&](int64_t first, int64_t count) {
        const at::Tensor block = logits.narrow(0, first, count).to(type);
        own.narrow(0, first, count).copy_(at::logsumexp(block, 1));
        const at::Tensor at_target = block.gather(1, places.narrow(0, first, count).unsqueeze(1)).squeeze(1);
        sums[1].narrow(0, first, count).copy_(at_target);
        sums[2].narrow(0, first, count).copy_(block.sum(1));
      });
    const at::Tensor largest = own.clone();
    all_reduce(slice.ranks, largest, comm::ReduceOp::kMax);
    const at::Tensor counts = targets.ne(ignored);
    sums[0].copy_((own - largest).exp());
    sums[1].masked_fill_(here.logical_and(counts).logical_not(), 0);
    sums[3].copy_(here.logical_or(counts.logical_not()));
    all_reduce(slice.ranks, sums, comm::ReduceOp::kSum);
    const at::Tensor unknown = sums[3].eq(0);
    if (logits.is_cpu() && unknown.any().item<bool>())
      fail(ErrorKind::kValue, "target ", targets.masked_select(unknown)[0].item<int64_t>(), " is not one of the ",
           slice.words, " words of the vocabulary, and not the ignored target ", ignored);
    const at::Tensor normalizers = largest + sums[0].log();
    ctx->save_for_backward({logits, normalizers, places, here.logical_and(counts)});
    ctx->saved_data["overwrite"] = overwrite;
    return {normalizers, sums[1].masked_fill(unknown, std::numeric_limits<float>::quiet_NaN()), sums[2].clone()};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (c10::GradMode::is_enabled())
      fail(ErrorKind::kRuntime, "the loss over a cut vocabulary has no second derivative: leave out create_graph=True");
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor logits = saved[0].detach();
    const auto type = type_of_sums(logits);
    const at::Tensor made = ctx->saved_data["overwrite"].toBool() ? logits : at::empty_like(logits);
    const auto rows = [](const at::Tensor& tensor, int64_t first, int64_t count) {
      return tensor.narrow(0, first, count).unsqueeze(1);
    };
    if (logits.size(1) > 0)
      by_blocks(logits, [&](int64_t first, int64_t count) {
        at::Tensor block = logits.narrow(0, first, count).to(type) - rows(saved[1], first, count);
        block = block.exp_();
        block.mul_(rows(grads[0], first, count));
        block.add_(rows(grads[2], first, count));
        block.scatter_add_(1, rows(saved[2], first, count),
                           rows(grads[1], first, count) * rows(saved[3], first, count));
        made.narrow(0, first, count).copy_(block);
      });
    return {made, {}, {}, {}, {}};
  }
};

}  // namespace

VocabSums vocab_sums(const VocabSlice& slice, const at::Tensor& logits, const at::Tensor& targets, int64_t ignored,
                     bool overwrite) {
  if (logits.dim() != 2 || logits.size(1) != slice.stop - slice.start || targets.dim() != 1 ||
      targets.size(0) != logits.size(0))
    fail(ErrorKind::kValue, "logits ", logits.sizes(), " of the words ", slice.start, " up to ", slice.stop,
         " and targets ", targets.sizes(), " do not fit: logits are (rows, words of this rank), targets (rows)");
  const variable_list made = VocabSumsOfRanks::apply(logits, targets, slice, ignored, overwrite);
  return {made[0], made[1], made[2]};
}

}  // namespace ds::parallel
