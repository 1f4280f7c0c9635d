#include "comm/calls/compose.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/ScalarTypeToTypeMeta.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "base/blocking_region.h"
#include "base/error.h"
#include "comm/calls/rank_order_reduction.h"
#include "comm/calls/strided_parts.h"

namespace ds::comm {

namespace {

using Counts = std::vector<int64_t>;
using Parts = std::vector<at::Tensor>;

// Up to here every rank gathers everything and reduces it, which saves a step.
constexpr size_t kGatheredBytes = 64 * 1024;

bool narrow_float(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

// As even as they can be; {}: they are even.
Counts shares(int64_t numel, int n) {
  Counts counts;
  if (numel % n == 0) return counts;
  const int64_t share = (numel + n - 1) / n;
  for (int r = 0; r < n; ++r) counts.push_back(std::min(share, std::max<int64_t>(0, numel - share * r)));
  return counts;
}

void copy_into(const at::Tensor& to, const at::Tensor& from) {
  if (to.data_ptr() != from.data_ptr()) to.view({-1}).copy_(from.view({-1}));
}

}  // namespace

std::vector<at::Tensor> parts_of(const at::Tensor& whole, const std::vector<int64_t>& counts, int n) {
  std::vector<at::Tensor> parts;
  const at::Tensor flat = whole.view({-1});
  const int64_t even = flat.numel() / n;
  int64_t begin = 0;
  for (int r = 0; r < n; ++r) {
    const int64_t count = counts.empty() ? even : counts[r];
    parts.push_back(flat.narrow(0, begin, count));
    begin += count;
  }
  return parts;
}

at::Tensor ScratchPool::take(int64_t numel, const at::TensorOptions& options) {
  if (!options.device().is_cpu()) return at::empty({numel}, options);
  const auto type = c10::typeMetaToScalarType(options.dtype());
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(type));
  {
    const auto lock = locked(mutex_);
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if (it->numel() != bytes) continue;
      at::Tensor found = std::move(*it);
      free_.erase(it);
      return found.view(type);
    }
  }
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte)).view(type);
}

void ScratchPool::give(const at::Tensor& tensor) {
  if (!tensor.device().is_cpu()) return;
  const auto lock = locked(mutex_);
  free_.push_back(tensor.view(at::kByte));
  if (free_.size() > kMost) free_.erase(free_.begin());
}

void reduce_parts(const at::Tensor& out, const Parts& parts, ReduceOp op) {
  const at::ScalarType type = parts[0].scalar_type();
  if (out.device().is_cpu()) {
    std::vector<const void*> rows;
    for (const at::Tensor& part : parts) rows.push_back(part.data_ptr());
    return reduce_in_rank_order(out.data_ptr(), rows.data(), static_cast<int>(rows.size()),
                                static_cast<size_t>(out.numel()), type, op, out.scalar_type() != type);
  }
  const auto widened = [&](const at::Tensor& part) { return narrow_float(type) ? part.to(at::kFloat) : part; };
  at::Tensor result = widened(parts[0]);
  for (size_t r = 1; r < parts.size(); ++r) {
    const at::Tensor other = widened(parts[r]);
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg: result = result + other; break;
      case ReduceOp::kProduct: result = result * other; break;
      case ReduceOp::kMin: result = at::minimum(result, other); break;
      case ReduceOp::kMax: result = at::maximum(result, other); break;
      case ReduceOp::kAnd: result = at::bitwise_and(result, other); break;
      case ReduceOp::kOr: result = at::bitwise_or(result, other); break;
      case ReduceOp::kXor: result = at::bitwise_xor(result, other); break;
    }
  }
  if (op == ReduceOp::kAvg)
    result = at::isIntegralType(type, false) ? at::div(result, static_cast<int64_t>(parts.size()), "trunc")
                                             : result / static_cast<int64_t>(parts.size());
  out.view({-1}).copy_(result);
}

// One call. Knows a communicator from inside.
class Composer {
 public:
  Composer(Communicator& communicator, const Op& op)
      : c_(communicator), op_(op), n_(c_.size()), me_(c_.rank()), pool_(c_.pool_) {}

  WorkPtr make() const {
    if (op_.parts) return packed();
    if (op_.verb != Verb::kBarrier && !c_.reaches(op_.own().device())) return through_host();
    if (is_message(op_.verb))
      fail(ErrorKind::kNotImplemented, "the transport ", c_.name(), " has no ", verb_name(op_.verb),
           op_.peer == kAnyRank ? " from any rank: name the sender" : " between two ranks");
    if (n_ == 1) return alone();
    switch (op_.verb) {
      case Verb::kAllReduce: return all_reduce();
      case Verb::kReduce: return reduce();
      case Verb::kBroadcast: return broadcast();
      case Verb::kReduceScatter: return reduce_scatter();
      case Verb::kAllGather: return all_gather();
      case Verb::kAllToAll: return all_to_all();
      case Verb::kGather: return gather();
      case Verb::kScatter: return scatter();
      default: break;
    }
    const at::Tensor all = at::zeros({n_}, at::TensorOptions().dtype(at::kByte));
    Op here = like(Verb::kAllGather, all.narrow(0, me_, 1), all);
    c_.launch(here)->wait();
    return done();
  }

 private:
  static WorkPtr done() { return std::make_shared<DoneWork>(); }
  bool root() const { return op_.peer == me_; }

  Op like(Verb verb, at::Tensor in, at::Tensor out) const {
    return {verb, std::move(in), std::move(out), {}, {}, op_.reduce, op_.peer, op_.tag};
  }

  WorkPtr alone() const {
    if (op_.in.defined() && op_.out.defined()) {
      if (op_.verb == Verb::kReduceScatter) {
        reduce_parts(op_.out, {op_.in.view({-1})}, op_.reduce);
      } else {
        copy_into(op_.out, op_.in);
      }
    }
    return done();
  }

  // Parts as the flat tensors that they make.
  WorkPtr packed() const {
    Op flat = op_;
    flat.parts = nullptr;
    flat.in = pool_->take(op_.in.numel(), op_.in.options());
    flat.out = pool_->take(op_.out.numel(), op_.out.options());
    op_.parts->pack(flat.in);
    const WorkPtr moved = c_.launch(flat);
    return std::make_shared<JoinedWork>(std::vector<WorkPtr>{moved},
                                        [parts = op_.parts, in = flat.in, out = flat.out, pool = pool_] {
                                          parts->unpack(out);
                                          pool->give(in);
                                          pool->give(out);
                                        });
  }

  WorkPtr through_host() const {
    Op host = op_;
    const bool in_place = op_.verb == Verb::kAllReduce || op_.verb == Verb::kReduce || op_.verb == Verb::kBroadcast;
    if (op_.in.defined()) host.in = op_.in.to(at::kCPU);
    if (op_.out.defined())
      host.out = in_place ? op_.out.to(at::kCPU) : at::empty(op_.out.sizes(), op_.out.options().device(at::kCPU));
    const WorkPtr work = c_.launch(host);
    const bool changed = op_.out.defined() && (op_.verb != Verb::kReduce || root());
    return std::make_shared<JoinedWork>(std::vector<WorkPtr>{work}, [out = op_.out, from = host.out, changed] {
      if (changed) out.copy_(from);
    });
  }

  // ---- transfers -----------------------------------------------------------------------------------------------
  // To each rank r goes give[r], from it comes take[r]; undefined or empty: nothing. None to this rank itself.
  WorkPtr transfer(const Parts& give, const Parts& take) const {
    const at::Tensor& some = op_.verb == Verb::kReduceScatter ? op_.in : op_.own();
    if (!c_.pairwise()) {
      Op all = like(Verb::kAllToAll, {}, {});
      all.in = joined(give, all.in_counts, some);
      const Receive receive = receive_buffer(take, all.out_counts, some);
      all.out = receive.whole;
      if (c_.carries(all)) {
        if (receive.direct) return c_.start(all);
        return std::make_shared<JoinedWork>(std::vector<WorkPtr>{c_.start(all)},
                                            [take, whole = all.out, counts = all.out_counts, n = n_] {
                                              const Parts parts = parts_of(whole, counts, n);
                                              for (int r = 0; r < n; ++r)
                                                if (parts[r].numel() > 0) take[r].view({-1}).copy_(parts[r]);
                                            });
      }
    }
    std::vector<Op> ops;
    for (int step = 1; step < n_; ++step) {
      const int to = (me_ + step) % n_, from = (me_ + n_ - step) % n_;
      if (take[from].defined() && take[from].numel() > 0) {
        ops.push_back(like(Verb::kRecv, {}, take[from]));
        ops.back().peer = from;
      }
      if (give[to].defined() && give[to].numel() > 0) {
        ops.push_back(like(Verb::kSend, give[to], {}));
        ops.back().peer = to;
      }
    }
    const Op probe = like(Verb::kSend, some, {});
    if (!c_.carries(probe))
      fail(ErrorKind::kNotImplemented, "the transport ", c_.name(), " carries neither ", verb_name(op_.verb),
           " nor what it can be made of: all_to_all, or send and recv");
    return c_.exchange(ops);
  }

  struct Receive {
    at::Tensor whole;
    bool direct;  // it is the parts themselves
  };

  // The parts one after the other, without a copy where they lie so already.
  static bool follow(const Parts& parts, Counts& counts, at::Tensor& first) {
    const char* next = nullptr;
    for (const at::Tensor& part : parts) {
      counts.push_back(part.defined() ? part.numel() : 0);
      if (counts.back() == 0) continue;
      if (next && part.data_ptr() != next) next = reinterpret_cast<const char*>(-1);
      if (!next) first = part;
      if (next != reinterpret_cast<const char*>(-1)) next = static_cast<const char*>(part.data_ptr()) + part.nbytes();
    }
    return next != reinterpret_cast<const char*>(-1);
  }

  static at::Tensor spread(const at::Tensor& first, const Counts& counts) {
    int64_t sum = 0;
    for (const int64_t count : counts) sum += count;
    return first.as_strided({sum}, {1});
  }

  static at::Tensor joined(const Parts& parts, Counts& counts, const at::Tensor& like) {
    at::Tensor first;
    const bool follows = follow(parts, counts, first);
    if (!first.defined()) return at::empty({0}, like.options());
    if (follows) return spread(first, counts);
    Parts flat;
    for (const at::Tensor& part : parts)
      if (part.defined()) flat.push_back(part.view({-1}));
    return at::cat(flat);
  }

  static Receive receive_buffer(const Parts& parts, Counts& counts, const at::Tensor& like) {
    at::Tensor first;
    const bool follows = follow(parts, counts, first);
    if (!first.defined()) return {at::empty({0}, like.options()), true};
    if (follows) return {spread(first, counts), true};
    int64_t sum = 0;
    for (const int64_t count : counts) sum += count;
    return {at::empty({sum}, first.options()), false};
  }

  // ---- verbs ---------------------------------------------------------------------------------------------------
  WorkPtr all_to_all() const {
    Parts give = parts_of(op_.in, op_.in_counts, n_), take = parts_of(op_.out, op_.out_counts, n_);
    copy_into(take[me_], give[me_]);
    return transfer(give, take);
  }

  WorkPtr all_gather() const {
    const Parts rows = parts_of(op_.out, op_.out_counts, n_);
    copy_into(rows[me_], op_.in);
    if (!c_.pairwise()) {
      std::vector<WorkPtr> parts;
      for (int r = 0; r < n_; ++r) {
        Op one = like(Verb::kBroadcast, {}, rows[r]);
        one.peer = r;
        if (!c_.carries(one)) break;
        parts.push_back(c_.start(one));
      }
      if (!parts.empty()) return std::make_shared<JoinedWork>(std::move(parts));
    }
    Parts give(n_, rows[me_]), take = rows;
    give[me_] = take[me_] = at::Tensor();
    return transfer(give, take);
  }

  WorkPtr broadcast() const {
    Parts give(n_), take(n_);
    for (int r = 0; root() && r < n_; ++r)
      if (r != me_) give[r] = op_.out;
    if (!root()) take[op_.peer] = op_.out;
    return transfer(give, take);
  }

  WorkPtr gather() const {
    Parts give(n_), take(n_);
    if (root()) {
      take = parts_of(op_.out, op_.out_counts, n_);
      copy_into(take[me_], op_.in);
      take[me_] = at::Tensor();
    } else {
      give[op_.peer] = op_.in;
    }
    return transfer(give, take);
  }

  WorkPtr scatter() const {
    Parts give(n_), take(n_);
    if (root()) {
      give = parts_of(op_.in, op_.in_counts, n_);
      copy_into(op_.out, give[me_]);
      give[me_] = at::Tensor();
    } else {
      take[op_.peer] = op_.out;
    }
    return transfer(give, take);
  }

  WorkPtr reduce_scatter() const {
    Parts give = parts_of(op_.in, op_.in_counts, n_);
    const at::Tensor own = give[me_];
    const at::Tensor received = pool_->take((n_ - 1) * own.numel(), own.options());
    Parts rows, take(n_);
    for (int r = 0; r < n_; ++r) {
      if (r != me_) take[r] = received.narrow(0, (r - (r > me_)) * own.numel(), own.numel());
      rows.push_back(r == me_ ? own : take[r]);
    }
    give[me_] = at::Tensor();
    const WorkPtr moved = transfer(give, take);
    return std::make_shared<JoinedWork>(std::vector<WorkPtr>{moved},
                                        [rows, received, out = op_.out, op = op_.reduce, pool = pool_] {
                                          reduce_parts(out, rows, op);
                                          pool->give(received);
                                        });
  }

  // Every element is reduced by one rank, or by all in the same order: the same bits for everybody.
  WorkPtr all_reduce() const {
    const at::Tensor flat = op_.out.view({-1});
    if (flat.nbytes() <= kGatheredBytes) {
      const at::Tensor all = at::empty({n_ * flat.numel()}, flat.options());
      const WorkPtr gathered = c_.launch(like(Verb::kAllGather, flat, all));
      return std::make_shared<JoinedWork>(std::vector<WorkPtr>{gathered}, [all, flat, op = op_.reduce, n = n_] {
        reduce_parts(flat, parts_of(all, {}, n), op);
      });
    }
    const Counts counts = shares(flat.numel(), n_);
    const at::Tensor own = parts_of(flat, counts, n_)[me_];
    Op reduce = like(Verb::kReduceScatter, flat, own), gather = like(Verb::kAllGather, own, flat);
    reduce.in_counts = gather.out_counts = counts;
    c_.launch(reduce)->wait();
    return c_.launch(gather);
  }

  WorkPtr reduce() const {
    const at::Tensor flat = op_.out.view({-1});
    if (flat.nbytes() <= kGatheredBytes) {
      const at::Tensor all = root() ? at::empty({n_ * flat.numel()}, flat.options()) : at::Tensor();
      const WorkPtr gathered = c_.launch(like(Verb::kGather, flat, all));
      return std::make_shared<JoinedWork>(std::vector<WorkPtr>{gathered}, [all, flat, op = op_.reduce, n = n_] {
        if (all.defined()) reduce_parts(flat, parts_of(all, {}, n), op);
      });
    }
    const Counts counts = shares(flat.numel(), n_);
    const at::Tensor copy_of = flat.clone(), own = parts_of(copy_of, counts, n_)[me_];
    Op reduce = like(Verb::kReduceScatter, copy_of, own);
    Op gather = like(Verb::kGather, own, root() ? flat : at::Tensor());
    reduce.in_counts = gather.out_counts = counts;
    c_.launch(reduce)->wait();
    return c_.launch(gather);
  }

  Communicator& c_;
  const Op& op_;
  const int n_, me_;
  const std::shared_ptr<ScratchPool> pool_;
};

WorkPtr compose(Communicator& communicator, const Op& op) { return Composer(communicator, op).make(); }

}  // namespace ds::comm
