#include "comm/communicator.h"

#include <utility>

#include "comm/calls/call_check.h"
#include "comm/calls/compose.h"

namespace ds::comm {

Communicator::Communicator() : pool_(std::make_shared<ScratchPool>()) {}
Communicator::~Communicator() = default;

std::shared_ptr<Communicator> Communicator::among(const std::vector<int>&) { return nullptr; }

c10::Device Communicator::device_for_numbers(const c10::Device& computes) const {
  return carries_host_memory() || computes.is_meta() ? c10::Device(c10::kCPU) : computes;
}

WorkPtr Communicator::launch(const Op& op) {
  if (op.more && !groups()) {
    std::vector<WorkPtr> parts;
    for (const Op& one : op.each()) parts.push_back(run(one));
    return std::make_shared<JoinedWork>(std::move(parts));
  }
  return carries(op) && (!op.parts || carries_parts()) ? start(op) : compose(*this, op);
}

WorkPtr Communicator::run(const Op& op) {
  check(op);
  count(op);
  return launch(op);
}

WorkPtr Communicator::run_all(const std::vector<Op>& ops) {
  std::vector<WorkPtr> parts;
  for (const Op& op : ops) {
    check(op);
    parts.push_back(launch(op));
  }
  return std::make_shared<JoinedWork>(std::move(parts));
}

void Communicator::check(const Op& op) const { check_call(op, rank(), size()); }

void Communicator::count(const Op& op) {
  if (op.verb == Verb::kBarrier) return;
  if (op.more && !groups()) return;  // each of them counts
  const auto add = [this](const Op& one) {
    const int64_t elements = one.sent(rank(), size());
    traffic_.elements += elements;
    traffic_.bytes += elements * static_cast<int64_t>(one.own().element_size());
  };
  ++traffic_.calls;
  op.visit_each(add);
}

WorkPtr Communicator::all_reduce(const at::Tensor& tensor, ReduceOp op, Tag tag) {
  return run({Verb::kAllReduce, {}, tensor, {}, {}, op, -1, tag});
}
WorkPtr Communicator::reduce(const at::Tensor& tensor, ReduceOp op, int root, Tag tag) {
  return run({Verb::kReduce, {}, tensor, {}, {}, op, root, tag});
}
WorkPtr Communicator::broadcast(const at::Tensor& tensor, int root, Tag tag) {
  return run({Verb::kBroadcast, {}, tensor, {}, {}, ReduceOp::kSum, root, tag});
}
WorkPtr Communicator::reduce_scatter(const at::Tensor& input, const at::Tensor& output, Tag tag) {
  return run({Verb::kReduceScatter, input, output, {}, {}, ReduceOp::kSum, -1, tag});
}
WorkPtr Communicator::all_gather(const at::Tensor& mine, const at::Tensor& all, Tag tag) {
  return run({Verb::kAllGather, mine, all, {}, {}, ReduceOp::kSum, -1, tag});
}
namespace {

Op op_of_pairs(Verb verb, std::vector<TensorPair> pairs, const std::string& tag) {
  Op made{verb, pairs.at(0).in, pairs.at(0).out, {}, {}, ReduceOp::kSum, -1, tag};
  if (pairs.size() == 1) return made;
  pairs.erase(pairs.begin());
  made.more = std::make_shared<const std::vector<TensorPair>>(std::move(pairs));
  return made;
}

}  // namespace

WorkPtr Communicator::all_gather(std::vector<TensorPair> pairs, Tag tag) {
  return run(op_of_pairs(Verb::kAllGather, std::move(pairs), tag));
}
WorkPtr Communicator::reduce_scatter(std::vector<TensorPair> pairs, Tag tag) {
  return run(op_of_pairs(Verb::kReduceScatter, std::move(pairs), tag));
}
WorkPtr Communicator::all_to_all(const at::Tensor& input, const at::Tensor& output, Tag tag) {
  return run({Verb::kAllToAll, input, output, {}, {}, ReduceOp::kSum, -1, tag});
}
WorkPtr Communicator::all_to_all(const at::Tensor& input, std::vector<int64_t> input_counts, const at::Tensor& output,
                                 std::vector<int64_t> output_counts, Tag tag) {
  return run(
      {Verb::kAllToAll, input, output, std::move(input_counts), std::move(output_counts), ReduceOp::kSum, -1, tag});
}
WorkPtr Communicator::gather(const at::Tensor& mine, const at::Tensor& all, int root, Tag tag) {
  return run({Verb::kGather, mine, all, {}, {}, ReduceOp::kSum, root, tag});
}
WorkPtr Communicator::scatter(const at::Tensor& all, const at::Tensor& mine, int root, Tag tag) {
  return run({Verb::kScatter, all, mine, {}, {}, ReduceOp::kSum, root, tag});
}
WorkPtr Communicator::send(const at::Tensor& tensor, int to, Tag tag) {
  return run({Verb::kSend, tensor, {}, {}, {}, ReduceOp::kSum, to, tag});
}
WorkPtr Communicator::recv(const at::Tensor& tensor, int from, Tag tag) {
  return run({Verb::kRecv, {}, tensor, {}, {}, ReduceOp::kSum, from, tag});
}
void Communicator::barrier() { run({})->wait(); }

}  // namespace ds::comm
