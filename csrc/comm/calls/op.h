// One call of a collective, as transports, decorators and logs see it.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/calls/reduce_op.h"

namespace ds::comm {

class StridedParts;

enum class Verb : uint8_t {
  kAllReduce,
  kReduce,
  kBroadcast,
  kReduceScatter,
  kAllGather,
  kAllToAll,
  kGather,
  kScatter,
  kSend,
  kRecv,
  kBarrier,
};
constexpr int kVerbs = 11;         // each has a row in op.cpp
const char* verb_name(Verb verb);  // all_reduce
std::string verb_names();          // all of them, for messages
bool reduces(Verb verb);           // all_reduce, reduce, reduce_scatter
bool has_peer(Verb verb);          // Op::peer is used
bool is_message(Verb verb);        // send, recv: between two ranks
bool gives(Verb verb, bool root);  // a rank passes Op::in; `root`: it is Op::peer
bool gets(Verb verb, bool root);   // a rank passes Op::out

// Tensors are contiguous. Which of them a verb uses, n being the number of ranks:
//
//   kAllReduce      out: reduced in place
//   kReduce         out: reduced in place on `peer`; the others' stays as it was
//   kBroadcast      out: of `peer` on all ranks
//   kReduceScatter  in: n parts, part r for rank r; out: the reduction of this rank's part, in its dtype or, of 16-bit
//                   floats, in fp32; it may lie where that part does. The rest of `in` is left undefined.
//   kAllGather      in: this rank's part; out: n parts by rank. `in` may lie where this rank's part of `out` does.
//   kAllToAll       in: n parts, part r for rank r; out: n parts, part r of rank r
//   kGather         in: this rank's part; out: n parts by rank, on `peer`; undefined on the others
//   kScatter        in: n parts, on `peer`; undefined on the others; out: this rank's part
//   kSend, kRecv    in, or out: to or from `peer`; messages between two ranks keep their order. A receive from kAnyRank
//                   takes the next message to this rank, where the transport can.
//   kBarrier        none
//
// n parts follow each other and have the same number of elements, unless in_counts or out_counts has that of each: of
// kReduceScatter and kScatter in_counts, of kAllGather and kGather out_counts, equal on all ranks (also where the
// tensor is undefined); of kAllToAll either.

// The tensors that a rank gives to a call and gets from it, where a call has several of each.
struct TensorPair {
  at::Tensor in, out;
};

constexpr int kAnyRank = -2;

// The time at which the caller waits for a call.
enum class Wait : uint8_t {
  kLater,     // it may do other work first
  kAtOnce,    // nothing is gained by a thread in the background
  kDetached,  // after other work, perhaps after a wait for these ranks by other means: the call moves on by itself
};

struct Op {
  Verb verb = Verb::kBarrier;
  at::Tensor in = {}, out = {};
  std::vector<int64_t> in_counts = {}, out_counts = {};
  ReduceOp reduce = ReduceOp::kSum;
  int peer = -1;
  // The purpose of the call, mostly a parameter's name; equal on all ranks. Messages about a mismatch show it.
  std::string tag = {};
  Wait wait = Wait::kLater;
  // kAllToAll: what is given and taken lies where these say; see strided_all_to_all().
  std::shared_ptr<const StridedParts> parts = nullptr;
  // kAllGather, kReduceScatter: further pairs, which are exchanged in the same call. Only where all parts are equal.
  std::shared_ptr<const std::vector<TensorPair>> more = nullptr;
  int message_tag = 0;                    // kSend, kRecv of scripts: a receive takes messages with its tag alone
  std::shared_ptr<int> sender = nullptr;  // kRecv from kAnyRank: the rank that sent, when the call has ended
  const char* logged_as = nullptr;        // the name of the call in the log; null: the verb's

  // The tensor that has all of what the call is about: n parts where there are, as far as this rank has them.
  const at::Tensor& whole() const;
  // The tensor that every rank has.
  const at::Tensor& own() const;
  // The elements that this rank sends, counted as Traffic (communicator.h) counts them.
  int64_t sent(int rank, int size) const;
  // The calls of one pair of tensors each that this one stands for; of most calls itself.
  std::vector<Op> each() const;
  template <typename Visit>
  void visit_each(const Visit& visit) const {
    if (!more) return visit(*this);
    for (const Op& one : each()) visit(one);
  }
};

}  // namespace ds::comm
