// Whole matrices in the middle of a step: the updates of one bucket, of which every rank has a part, orthogonalised.
//
// [Note: owners of matrices]
// An orthogonalisation is one computation on a whole matrix. Every rank could gather everything and compute everything;
// instead each matrix of a bucket has one owner, chosen so that the owners' costs are even. The updates are gathered,
// every rank overwrites its own matrices by the results and the others by zeros, and the sum over the ranks brings the
// results back: a reduce-scatter where masters are sharded, an all-reduce where they are not (stage 0: no gather then).
// A number plus zeros is exact, so all ranks end with the owner's bits. The price, for N ranks and a bucket of n
// elements: 2 n (N - 1) / N elements sent by each rank, and fp32 memory for n elements while the bucket is stepped.
#pragma once
#include <functional>

#include "zero/step/newton_schulz.h"
#include "zero/spaces/param_store.h"

namespace ds::zero {

// The rank that computes each of `costs`: the most expensive first, each to the rank with the least so far.
std::vector<int> spread_costs(const std::vector<int64_t>& costs, int ranks);

// `row`: this rank's row of the bucket, fp32. The parts of `used` parameters are replaced by their orthogonalisation,
// the rest by zeros. Collective: every rank of the space.
void orthogonalise_bucket(const ParamStore& store, const ParamSpace& space, const plan::Bucket& bucket,
                          const std::function<bool(size_t param)>& used, const NewtonSchulz& iteration,
                          const at::Tensor& row);

}  // namespace ds::zero
