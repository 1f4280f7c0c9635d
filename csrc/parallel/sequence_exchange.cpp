#include "parallel/sequence_exchange.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include <numeric>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/ranges.h"
#include "parallel/gradient_node.h"

namespace ds::parallel {

namespace {

using comm::StridedParts;
using plan::SequenceBox;

constexpr int64_t kHeads = 2;  // the dimension

std::vector<int64_t> in_order(int64_t dims) {
  std::vector<int64_t> order(static_cast<size_t>(dims));
  std::iota(order.begin(), order.end(), 0);
  return order;
}

// Dimensions as they follow each other in memory, outermost first, and in what travels.
std::vector<int64_t> order_of(int64_t dims, const SequenceLayout& layout) {
  std::vector<int64_t> order = in_order(dims);
  if (!layout.heads_first) return order;
  order[0] = 1 - layout.sequence_dim;  // the batch
  order[1] = kHeads;
  order[2] = layout.sequence_dim;
  return order;
}

comm::StridedView box_of(const at::Tensor& tensor, const SequenceBox& box, const std::vector<int64_t>& order,
                         int64_t sequence_dim) {
  c10::SmallVector<int64_t, 5> sizes, strides;
  for (const int64_t dim : order) {
    sizes.push_back(dim == sequence_dim ? box.tokens : dim == kHeads ? box.heads : tensor.size(dim));
    strides.push_back(tensor.stride(dim));
  }
  return {tensor, std::move(sizes), std::move(strides),
          tensor.storage_offset() + box.token * tensor.stride(sequence_dim) + box.head * tensor.stride(kHeads)};
}

std::vector<int64_t> sizes_with(const at::Tensor& like, const SequenceLayout& layout, int64_t tokens, int64_t heads) {
  std::vector<int64_t> sizes = like.sizes().vec();
  sizes[layout.sequence_dim] = tokens;
  sizes[kHeads] = heads;
  return sizes;
}

void check(const std::vector<at::Tensor>& tensors, const SequenceLayout& layout, const comm::Communicator& group,
           bool whole) {
  const plan::SequenceCut& cut = layout.cut;
  if (tensors.size() != cut.tensors() || cut.ranks() != group.size())
    fail(ErrorKind::kValue, "an exchange of ", cut.tensors(), " tensors among ", cut.ranks(), " ranks got ",
         tensors.size(), " tensors and ", group.size(), " ranks");
  const int64_t tokens = whole ? cut.length() : cut.tokens(group.rank());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    const int64_t heads = whole ? cut.heads(i, group.rank()) : cut.all_heads(i);
    if (tensor.dim() < 3 || tensor.size(layout.sequence_dim) != tokens || tensor.size(kHeads) != heads)
      fail(ErrorKind::kValue, "tensor ", i, " of an exchange has shape [", c10::Join(", ", tensor.sizes()), "]: rank ",
           group.rank(), " has ", tokens, " tokens (dimension ", layout.sequence_dim, ") and ", heads,
           " heads (dimension 2)");
  }
}

// Copies of a head, added up in rank order: `stacked` has the runs of all ranks side by side.
void add_copies(const at::Tensor& stacked, const at::Tensor& whole, size_t tensor, const SequenceLayout& layout) {
  whole.zero_();
  for (int reader = 0; reader < layout.cut.ranks(); ++reader) {
    const SequenceBox from = layout.cut.in_stack(tensor, 0, reader), to = layout.cut.in_part(tensor, 0, reader);
    if (from.heads > 0) whole.narrow(kHeads, to.head, to.heads).add_(stacked.narrow(kHeads, from.head, from.heads));
  }
}

// The shape on which ranks that share a sequence must agree, for the call's record: [2, 16, 4+2+2, 8], of the whole.
// Ranks with other numbers would read what was never written; this way they hear of each other.
std::string agreed(const std::vector<at::Tensor>& tensors, const SequenceLayout& layout) {
  std::string text = "sequence [";
  for (int64_t dim = 0; dim < tensors[0].dim(); ++dim) {
    text += dim == 0 ? "" : ", ";
    if (dim == layout.sequence_dim) text += std::to_string(layout.cut.length());
    for (size_t i = 0; dim == kHeads && i < tensors.size(); ++i)
      text += (i == 0 ? "" : "+") + std::to_string(layout.cut.all_heads(i));
    if (dim != layout.sequence_dim && dim != kHeads) text += std::to_string(tensors[0].size(dim));
  }
  return text + "]";
}

}  // namespace

SequenceExchange::SequenceExchange(comm::CommunicatorPtr communicator) : communicator_(std::move(communicator)) {}

comm::WorkPtr SequenceExchange::start(StridedParts::Views give, StridedParts::Views take, bool detached,
                                      const std::string& agreed) {
  const auto parts = std::make_shared<const StridedParts>(std::move(give), std::move(take));
  ++calls_;
  for (const int64_t count : parts->give_counts()) elements_ += count;
  return communicator_->run(comm::strided_all_to_all(parts, agreed, detached));
}

comm::WorkPtr SequenceExchange::start_views(StridedParts::Views give, StridedParts::Views take) {
  const c10::NoGradGuard guard;
  return start(std::move(give), std::move(take), true, "sequence");
}

Exchanged SequenceExchange::start_to_heads(const std::vector<at::Tensor>& parts, const SequenceLayout& layout,
                                           bool detached) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  check(parts, layout, *communicator_, false);
  const std::string facts = agreed(parts, layout);
  const int me = communicator_->rank(), ranks = communicator_->size();
  Exchanged made;
  for (size_t i = 0; i < parts.size(); ++i)
    made.tensors.push_back(memory_->take(sizes_with(parts[i], layout, layout.cut.length(), layout.cut.heads(i, me)),
                                         order_of(parts[i].dim(), layout), parts[i].options()));
  StridedParts::Views give(ranks), take(ranks);
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::vector<int64_t> order = order_of(parts[i].dim(), layout);
    for (int rank = 0; rank < ranks; ++rank) {
      give[rank].push_back(box_of(parts[i], layout.cut.in_part(i, me, rank), order, layout.sequence_dim));
      take[rank].push_back(box_of(made.tensors[i], layout.cut.in_whole(i, rank, me), order, layout.sequence_dim));
    }
  }
  made.work = start(std::move(give), std::move(take), detached, facts);
  return made;
}

Exchanged SequenceExchange::start_to_sequence(const std::vector<at::Tensor>& wholes, const SequenceLayout& layout,
                                              bool detached) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  check(wholes, layout, *communicator_, true);
  const std::string facts = agreed(wholes, layout);
  const int me = communicator_->rank(), ranks = communicator_->size();
  Exchanged made;
  std::vector<at::Tensor> received;  // buffers of copies, or the result itself
  const auto fresh = [&](size_t i, int64_t heads) {
    return memory_->take(sizes_with(wholes[i], layout, layout.cut.tokens(me), heads), in_order(wholes[i].dim()),
                         wholes[i].options());
  };
  for (size_t i = 0; i < wholes.size(); ++i) {
    made.tensors.push_back(fresh(i, layout.cut.all_heads(i)));
    received.push_back(layout.cut.copied(i) ? fresh(i, layout.cut.stacked_heads(i)) : made.tensors[i]);
  }
  StridedParts::Views give(ranks), take(ranks);
  bool copied = false;
  for (size_t i = 0; i < wholes.size(); ++i) {
    const bool stacked = layout.cut.copied(i);
    copied = copied || stacked;
    const std::vector<int64_t> order = order_of(wholes[i].dim(), layout);
    for (int rank = 0; rank < ranks; ++rank) {
      give[rank].push_back(box_of(wholes[i], layout.cut.in_whole(i, rank, me), order, layout.sequence_dim));
      take[rank].push_back(box_of(received[i],
                                  stacked ? layout.cut.in_stack(i, me, rank) : layout.cut.in_part(i, me, rank), order,
                                  layout.sequence_dim));
    }
  }
  made.work = start(std::move(give), std::move(take), detached, facts);
  if (copied)
    made.work = std::make_shared<comm::JoinedWork>(std::vector<comm::WorkPtr>{made.work},
                                                   [received, tensors = made.tensors, layout] {
                                                     const c10::NoGradGuard no_grad;
                                                     for (size_t i = 0; i < tensors.size(); ++i)
                                                       if (layout.cut.copied(i))
                                                         add_copies(received[i], tensors[i], i, layout);
                                                   });
  return made;
}

std::vector<at::Tensor> SequenceExchange::to_heads(const std::vector<at::Tensor>& parts,
                                                   const SequenceLayoutPtr& layout) {
  Exchanged made = start_to_heads(parts, *layout, false);
  made.work->wait();
  return with_gradient(
      "SequenceToHeadsBackward", parts, std::move(made.tensors),
      [self = shared_from_this(), layout](const Tensors& grads) { return self->to_sequence(grads, layout); });
}

std::vector<at::Tensor> SequenceExchange::to_sequence(const std::vector<at::Tensor>& wholes,
                                                      const SequenceLayoutPtr& layout) {
  Exchanged made = start_to_sequence(wholes, *layout, false);
  made.work->wait();
  return with_gradient(
      "HeadsToSequenceBackward", wholes, std::move(made.tensors),
      [self = shared_from_this(), layout](const Tensors& grads) { return self->to_heads(grads, layout); });
}

}  // namespace ds::parallel
