#include "comm/calls/call_check.h"

#include "base/error.h"
#include "base/ranges.h"

namespace ds::comm {

namespace {

using Tensors = std::vector<at::Tensor>;
using Counts = std::vector<int64_t>;

bool sixteen_bit_float(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

// Names of the two sides of a call, for messages.
constexpr const char* kInput = "input";
constexpr const char* kOutput = "output";

void check_there(const char* verb, const at::Tensor& tensor, const char* side) {
  if (!tensor.defined()) fail(ErrorKind::kValue, verb, ": ", side, " is missing");
  if (tensor.layout() != at::kStrided)
    fail(ErrorKind::kType, verb, ": the ", side, " has the layout ", tensor.layout(), "; pass a dense tensor");
}

void check_contiguous(const char* verb, const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return;
  fail(ErrorKind::kValue, verb, ": collectives need contiguous tensors, got strides ", tensor.strides(), " for shape ",
       tensor.sizes(), ": pass tensor.contiguous() and copy the result back.");
}

// Checks two tensors of one call.
void check_alike(Verb verb, const at::Tensor& in, const at::Tensor& out, bool may_widen) {
  if (in.device() != out.device())
    fail(ErrorKind::kValue, verb_name(verb), ": the input is on ", in.device(), ", the output on ", out.device(),
         ": move them to one device");
  const at::ScalarType from = in.scalar_type(), to = out.scalar_type();
  if (from == to) return;
  if (may_widen && verb == Verb::kReduceScatter && sixteen_bit_float(from) && to == at::kFloat) return;
  fail(ErrorKind::kType, verb_name(verb), ": the input is ", c10::toString(from), ", the output ", c10::toString(to),
       ": give both one dtype");
}

void check_peer(Verb verb, int peer, int rank, int size) {
  if (verb == Verb::kRecv && peer == kAnyRank) return;
  if (peer < 0 || peer >= size)
    fail(ErrorKind::kValue, verb_name(verb), ": there is no rank ", peer, " in a group of ", size, " ranks");
  if (is_message(verb) && peer == rank)
    fail(ErrorKind::kValue, verb_name(verb), ": rank ", peer, " is this rank itself");
}

int64_t checked_sum(const char* verb, const Counts& counts) {
  for (const int64_t count : counts)
    if (count < 0) fail(ErrorKind::kValue, verb, ": a count is ", count, ": counts are 0 or more");
  return sum_of(counts);
}

// `mine` is one of n parts of `whole`, which only some ranks have.
void check_part(const char* verb, const at::Tensor& whole, const at::Tensor& mine, const Counts& counts, int rank,
                int n) {
  if (counts.empty()) {
    if (whole.defined() && whole.numel() != mine.numel() * n)
      fail(ErrorKind::kValue, verb, ": ", whole.numel(), " elements for ", n, " rows of ", mine.numel());
    return;
  }
  if (static_cast<int>(counts.size()) != n)
    fail(ErrorKind::kValue, verb, ": ", counts.size(), " counts for ", n, " ranks");
  const int64_t sum = checked_sum(verb, counts);
  if (counts[rank] != mine.numel())
    fail(ErrorKind::kValue, verb, ": rank ", rank, " has ", mine.numel(), " elements, its count is ", counts[rank]);
  if (whole.defined() && whole.numel() != sum)
    fail(ErrorKind::kValue, verb, ": ", whole.numel(), " elements, but the counts of the ranks add up to ", sum);
}

void check_cut(const char* verb, const at::Tensor& whole, const Counts& counts, int n, const char* side) {
  if (counts.empty()) {
    if (whole.numel() % n)
      fail(ErrorKind::kValue, verb, ": the ", side, " of ", whole.numel(), " elements cannot be cut into ", n,
           " equal parts: give the counts");
    return;
  }
  if (static_cast<int>(counts.size()) != n || checked_sum(verb, counts) != whole.numel())
    fail(ErrorKind::kValue, verb, ": the counts of the ", side, " must be ", n, " numbers that add up to its ",
         whole.numel(), " elements");
}

// ---- lists ----------------------------------------------------------------------------------------------------------

// A tensor of n rows, or one tensor for each rank.
void check_rows(const char* verb, const Tensors& rows, const at::Tensor& row, int n, bool output) {
  const int64_t numel = row.numel();
  if (rows.size() == 1 && n != 1) {
    if (rows[0].numel() == numel * n) return;
    if (output)
      fail(ErrorKind::kValue, "all_gather_into_tensor: the output has ", rows[0].numel(), " elements, the input ",
           numel, "; over ", n, " ranks the output must have ", numel * n, ".");
    fail(ErrorKind::kValue, "reduce_scatter_tensor: the input has ", rows[0].numel(), " elements, the output ", numel,
         "; over ", n, " ranks the input must have ", numel * n, ".");
  }
  if (static_cast<int>(rows.size()) != n)
    fail(ErrorKind::kValue, verb, ": there must be one tensor for each of the ", n, " ranks, got ", rows.size());
  for (const at::Tensor& each : rows)
    if (each.numel() != numel)
      fail(ErrorKind::kValue, verb, ": all tensors must have ", numel, " elements, one has ", each.numel());
}

void check_splits(const Tensors& tensors, const Counts& splits, int n, const char* side) {
  if (tensors.size() != 1 || (n == 1 && splits.empty())) {
    if (static_cast<int>(tensors.size()) != n)
      fail(ErrorKind::kValue, "all_to_all: there must be one input and one output for each of the ", n, " ranks");
    return;
  }
  const int64_t first = tensors[0].dim() > 0 ? tensors[0].size(0) : 1;
  if (splits.empty()) {
    if (first % n != 0)
      fail(ErrorKind::kValue, "all_to_all_single: the first dimension of the ", side, ", ", first,
           ", cannot be divided by ", n, " ranks; give the split sizes");
  } else if (static_cast<int>(splits.size()) != n || checked_sum("all_to_all_single", splits) != first) {
    fail(ErrorKind::kValue, "all_to_all_single: the split sizes of the ", side, " must be ", n,
         " numbers that add up to its first dimension, ", first);
  }
}

}  // namespace

void check_call(const Op& op, int rank, int size) {
  if (op.verb == Verb::kBarrier) return;
  const char* const verb = verb_name(op.verb);
  if (op.more) {
    if (op.verb != Verb::kAllGather && op.verb != Verb::kReduceScatter)
      fail(ErrorKind::kValue, verb, ": only all_gather and reduce_scatter take several tensors in one call");
    for (const Op& one : op.each()) check_call(one, rank, size);
    return;
  }
  const bool root = op.peer == rank;
  if (op.verb == Verb::kGather && root && !op.out.defined())
    fail(ErrorKind::kValue, "gather: the root gives no tensor to gather in");
  if (op.verb == Verb::kScatter && root && !op.in.defined())
    fail(ErrorKind::kValue, "scatter: the root gives no tensor to scatter");
  if (has_peer(op.verb)) check_peer(op.verb, op.peer, rank, size);
  if (gives(op.verb, root)) check_there(verb, op.in, kInput);
  if (gets(op.verb, root)) check_there(verb, op.out, kOutput);
  if (!op.parts) {  // else the tensors only say how much there is
    if (op.in.defined()) check_contiguous(verb, op.in);
    if (op.out.defined()) check_contiguous(verb, op.out);
  }
  if (op.in.defined() && op.out.defined()) check_alike(op.verb, op.in, op.out, true);
  switch (op.verb) {
    case Verb::kReduceScatter:
    case Verb::kScatter: return check_part(verb, op.in, op.out, op.in_counts, rank, size);
    case Verb::kAllGather:
    case Verb::kGather: return check_part(verb, op.out, op.in, op.out_counts, rank, size);
    case Verb::kAllToAll:
      check_cut(verb, op.in, op.in_counts, size, kInput);
      return check_cut(verb, op.out, op.out_counts, size, kOutput);
    default: return;
  }
}

void check_call(const ListCall& call, int rank, int size) {
  const Verb verb = call.verb;
  if (verb == Verb::kBarrier) return;
  const char* const name = verb_name(verb);
  const bool root = call.peer == rank;
  if (has_peer(verb)) check_peer(verb, call.peer, rank, size);
  if (gives(verb, root) && call.in.empty()) fail(ErrorKind::kValue, name, ": ", kInput, " is missing");
  if (gets(verb, root) && call.out.empty()) fail(ErrorKind::kValue, name, ": ", kOutput, " is missing");
  for (const at::Tensor& each : call.in) check_there(name, each, kInput);
  for (const at::Tensor& each : call.out) check_there(name, each, kOutput);
  // Lists of which this rank needs nothing may hold anything.
  const bool takes = gets(verb, root) && !call.out.empty(), given = gives(verb, root) && !call.in.empty();
  const at::Tensor& some = given ? call.in[0] : call.out[0];
  if (given)
    for (const at::Tensor& each : call.in) check_alike(verb, each, some, false);
  if (takes)
    for (const at::Tensor& each : call.out) check_alike(verb, some, each, false);
  if (verb == Verb::kAllGather || (verb == Verb::kGather && root)) check_rows(name, call.out, call.in[0], size, true);
  if (verb == Verb::kReduceScatter || (verb == Verb::kScatter && root))
    check_rows(name, call.in, call.out[0], size, false);
  if (verb == Verb::kAllToAll) {
    check_splits(call.in, call.in_splits, size, kInput);
    check_splits(call.out, call.out_splits, size, kOutput);
  }
}

}  // namespace ds::comm
