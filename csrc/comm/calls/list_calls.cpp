#include "comm/calls/list_calls.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include <numeric>
#include <utility>

#include "comm/calls/call_check.h"

namespace ds::comm {

namespace {

using Tensors = std::vector<at::Tensor>;
using Counts = std::vector<int64_t>;

// One contiguous tensor that has the elements of all in order: where they lie so already, in the same memory.
bool adjacent(const Tensors& tensors) {
  const char* next = nullptr;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_contiguous() || tensor.scalar_type() != tensors[0].scalar_type()) return false;
    const char* const here = static_cast<const char*>(tensor.data_ptr());
    if (next && here != next) return false;
    next = here + tensor.nbytes();
  }
  return true;
}

int64_t numel_of(const Tensors& tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), int64_t{0},
                         [](int64_t sum, const at::Tensor& each) { return sum + each.numel(); });
}

at::Tensor joined(const Tensors& tensors) {
  if (tensors.empty()) return {};
  if (tensors.size() == 1) return tensors[0].contiguous();
  if (numel_of(tensors) > 0 && tensors[0].numel() > 0 && adjacent(tensors))
    return tensors[0].as_strided({numel_of(tensors)}, {1});
  Tensors flat;
  for (const at::Tensor& tensor : tensors) flat.push_back(tensor.reshape({-1}));
  return at::cat(flat);
}

// The memory that results arrive in, and the copies that remain then.
struct Received {
  explicit Received(const Tensors& tensors, bool filled, at::ScalarType type) : given(tensors) {
    if (given.empty()) return;
    const bool direct = given[0].scalar_type() == type &&
                        (given.size() == 1 ? given[0].is_contiguous() : given[0].numel() > 0 && adjacent(given));
    if (direct || filled) whole = joined(given).to(type);
    if (!direct && !filled) whole = at::empty({numel_of(given)}, given[0].options().dtype(type));
    copies = !direct;
  }
  void finish() const {
    if (!copies) return;
    const at::NoGradGuard no_grad;
    int64_t begin = 0;
    for (const at::Tensor& each : given) {
      at::Tensor(each).copy_(whole.view({-1}).narrow(0, begin, each.numel()).view(each.sizes()));
      begin += each.numel();
    }
  }
  Tensors given;
  at::Tensor whole;
  bool copies = false;
};

// In elements, of tensors that fit.
Counts counts_of(const Tensors& tensors, const Counts& splits, int n) {
  Counts counts;
  if (tensors.size() != 1 || n == 1) {
    for (const at::Tensor& each : tensors) counts.push_back(each.numel());
    return counts;
  }
  const at::Tensor& tensor = tensors[0];
  const int64_t first = tensor.dim() > 0 ? tensor.size(0) : 1;
  for (const int64_t split : splits) counts.push_back(first ? split * (tensor.numel() / first) : 0);
  return counts;
}

}  // namespace

WorkPtr run_call(Communicator& communicator, ListCall call) {
  const int n = communicator.size();
  check_call(call, communicator.rank(), n);
  for (Tensors* tensors : {&call.in, &call.out})
    for (at::Tensor& each : *tensors)
      if (each.requires_grad()) each = each.detach();
  Op op{call.verb, {}, {}, {}, {}, call.reduce, call.peer, {}, call.detached ? Wait::kDetached : Wait::kAtOnce};
  op.message_tag = call.message_tag;
  op.sender = call.sender;
  const bool root = call.peer == communicator.rank();
  if (call.verb == Verb::kAllToAll) {
    op.in_counts = counts_of(call.in, call.in_splits, n);
    op.out_counts = counts_of(call.out, call.out_splits, n);
  }
  if (call.verb == Verb::kGather && !root) call.out.clear();
  if (call.verb == Verb::kScatter && !root) call.in.clear();
  const Tensors& some = call.out.empty() ? call.in : call.out;
  at::ScalarType type = some.empty() ? at::kByte : some[0].scalar_type();
  if (reduces(call.verb) && at::isFloatingType(type) && some[0].element_size() == 1) type = at::kFloat;
  if (type == at::kBool && call.reduce == ReduceOp::kAvg) op.reduce = ReduceOp::kMax;  // whether any is true
  op.in = joined(call.in);
  if (op.in.defined() && reduces(call.verb)) op.in = op.in.to(type);
  const bool filled = call.verb == Verb::kAllReduce || call.verb == Verb::kReduce || call.verb == Verb::kBroadcast;
  const Received received(call.out, filled, type);
  op.out = received.whole;
  WorkPtr work = communicator.run(op);
  // Transports hold the tensors of the caller. Only this call holds copies of them until the work is done.
  const bool copied = op.in.defined() && !(call.in.size() == 1 && op.in.is_same(call.in[0]));
  if (!copied && !received.copies) return work;
  const bool mine = call.verb != Verb::kReduce || root;
  return std::make_shared<JoinedWork>(std::vector<WorkPtr>{std::move(work)}, [received, mine, in = op.in] {
    if (mine) received.finish();
  });
}

}  // namespace ds::comm
