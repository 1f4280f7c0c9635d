// Ranks that share a sequence exchange their parts of it, with all heads, for the whole of it with some heads, and
// back: Jacobs et al., "DeepSpeed Ulysses" (2023). Queries, keys and values travel in one all_to_all, from where they
// lie to where attention wants them (comm/calls/strided_parts.h). Each direction is the other's gradient.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/calls/strided_parts.h"
#include "parallel/result_memory.h"
#include "plan/sequence_cut.h"

namespace ds::parallel {

struct SequenceLayout {
  plan::SequenceCut cut;
  int64_t sequence_dim;  // 1: [batch, sequence, heads, ...], 0: [sequence, batch, heads, ...]
  // The result of to_heads lies in memory as [batch, heads, sequence, ...], where most attention wants it. Equal on all
  // ranks, as the rest is.
  bool heads_first = false;
};
using SequenceLayoutPtr = std::shared_ptr<const SequenceLayout>;

// A pending exchange; `tensors` may be read after wait() has returned.
struct Exchanged {
  std::vector<at::Tensor> tensors;
  comm::WorkPtr work;
};

class SequenceExchange : public std::enable_shared_from_this<SequenceExchange> {
 public:
  explicit SequenceExchange(comm::CommunicatorPtr communicator);

  // Gives the whole sequence of each tensor with this rank's heads; without a gradient. `detached`: the caller goes on.
  Exchanged start_to_heads(const std::vector<at::Tensor>& parts, const SequenceLayout& layout, bool detached);
  // Gives, for each tensor, this rank's part of the sequence with all heads; copies of a head are added up in rank
  // order.
  Exchanged start_to_sequence(const std::vector<at::Tensor>& wholes, const SequenceLayout& layout, bool detached);
  // The same with gradients, complete on return.
  std::vector<at::Tensor> to_heads(const std::vector<at::Tensor>& parts, const SequenceLayoutPtr& layout);
  std::vector<at::Tensor> to_sequence(const std::vector<at::Tensor>& wholes, const SequenceLayoutPtr& layout);
  // Views to and from any ranks, without a gradient.
  comm::WorkPtr start_views(comm::StridedParts::Views give, comm::StridedParts::Views take);

  const comm::CommunicatorPtr& communicator() const { return communicator_; }
  // The calls and elements that this rank has given to exchanges, those for itself included.
  int64_t calls() const { return calls_; }
  int64_t elements() const { return elements_; }

 private:
  comm::WorkPtr start(comm::StridedParts::Views give, comm::StridedParts::Views take, bool detached,
                      const std::string& agreed);

  const comm::CommunicatorPtr communicator_;
  const std::shared_ptr<ResultMemory> memory_ = std::make_shared<ResultMemory>();
  int64_t calls_ = 0, elements_ = 0;
};

}  // namespace ds::parallel
