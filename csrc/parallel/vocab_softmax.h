// The softmax over a vocabulary of which each rank has a slice of the words: Shoeybi et al., "Megatron-LM" (2019),
// section 3. No rank ever has the logits of all words.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>

#include "comm/communicator.h"

namespace ds::parallel {

// The words of this rank: `start` up to `stop` of `words`.
struct VocabSlice {
  comm::CommunicatorPtr ranks;
  int64_t start, stop, words;
};

// Three numbers in fp32 (fp64 for logits in fp64) for each row, on all ranks alike.
struct VocabSums {
  at::Tensor normalizers;  // log of the sum over all words of exp(logit)
  at::Tensor picked;       // the logit of the row's target; zero where the target is `ignored`
  at::Tensor totals;       // the sum of the logits of all words
};

// `logits`: (rows, stop - start), of any floating-point type; `targets`: (rows), numbers of words. Two all-reduces of a
// few numbers for each row; backward needs none. With `overwrite` backward writes the gradient over the logits. A
// target that is not a word is an error on every rank, but on an asynchronous device its logit is NaN. Gradients have
// no gradients.
VocabSums vocab_sums(const VocabSlice& slice, const at::Tensor& logits, const at::Tensor& targets, int64_t ignored,
                     bool overwrite);

}  // namespace ds::parallel
