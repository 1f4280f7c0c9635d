// Adds the sums of squares of the spaces of an engine up to one, over all ranks.
//
// [Note: one norm]
// Each space has a sum, which is added up over the lists of SpaceRanks::norm_over, one after the other. Spaces whose
// remaining lists are the same are added before the next call. So ranks with different spaces make equal calls: a
// stage of a pipeline with experts meets one without them only behind the calls of the experts, and every rank makes
// the calls of dense parameters. A space of which an earlier rank has a copy has no sum here.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "zero/spaces/param_store.h"

namespace ds::zero {

class NormSums {
 public:
  // `total`: fp64. Its first element is the sum of dense parameters and becomes that of all; what else it has is added
  // up over everyone, beside it.
  NormSums(const ParamStore& store, at::Tensor total);

  void clear();
  // One fp64 element to which this rank adds the squares of the space; undefined where they are counted elsewhere.
  at::Tensor of(size_t space) const;
  // All ranks call it once after each clear(), then `total` has the sum.
  void add_up(const char* tag) const;
  // Before add_up, of sums that differ among ranks that have the same parameters: they become the mean over these.
  void mean_over(comm::Communicator& ranks, const char* tag) const;
  const at::Tensor& total() const { return total_; }
  size_t calls() const { return lists_.size() - 1; }  // that add_up makes: one for each lists but the empty ones

 private:
  // Sums that are added up over the same remaining lists. `sum`: where; after its call it is that of the next lists.
  struct Lists {
    std::vector<NormRanks> over;
    at::Tensor sum;
    std::vector<at::Tensor> joining{};  // before the call
  };

  at::Tensor add_lists(std::vector<NormRanks> over, const at::Tensor& sum);

  at::Tensor total_, others_;  // those of one element each that are added to another
  std::vector<at::Tensor> of_space_;
  std::vector<Lists> lists_;  // the longest first
};

}  // namespace ds::zero
