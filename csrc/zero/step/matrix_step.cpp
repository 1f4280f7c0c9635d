#include "zero/step/matrix_step.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <numeric>

namespace ds::zero {

namespace {

int64_t cost_of(const ParamSpec& spec, const NewtonSchulz& iteration) {
  const at::IntArrayRef sizes = spec.sizes();
  int64_t numel = 1;
  for (int64_t size : sizes) numel *= size;
  const int64_t rows = sizes.empty() ? 1 : sizes[0];
  return numel == 0 ? 0 : iteration.cost(rows, numel / rows);
}

// Parameter number `index` of the space within `full`, the elements of one bucket.
class InBucket {
 public:
  InBucket(const ParamSpace& space, const plan::Bucket& bucket, int32_t index, const at::Tensor& full)
      : map_(space.map), begin_(space.map.full_begin(bucket)), index_(static_cast<size_t>(index)), full_(full) {}

  void zero() const {
    for_parts([](const at::Tensor& part, int64_t) { part.zero_(); });
  }
  void orthogonalise(const ParamSpec& spec, const NewtonSchulz& iteration) const {
    if (map_.offsets[index_] >= 0) {
      iteration.apply(
          full_.as_strided(spec.sizes(), spec.strides(), full_.storage_offset() + map_.offsets[index_] - begin_));
      return;
    }
    const at::Tensor whole = at::empty({map_.numels[index_]}, full_.options());
    for_parts([&](const at::Tensor& part, int64_t at) { whole.narrow(0, at, part.numel()).copy_(part); });
    iteration.apply(whole.as_strided(spec.sizes(), spec.strides()));
    for_parts([&](const at::Tensor& part, int64_t at) { part.copy_(whole.narrow(0, at, part.numel())); });
  }

 private:
  template <typename Visit>
  void for_parts(const Visit& visit) const {
    for (size_t e = map_.first[index_]; e < map_.first[index_ + 1]; ++e) {
      const plan::Extent& extent = map_.extents[e];
      visit(full_.narrow(0, extent.full_offset - begin_, extent.numel), extent.param_offset);
    }
  }

  const plan::ShardMap& map_;
  const int64_t begin_;
  const size_t index_;
  const at::Tensor& full_;
};

}  // namespace

std::vector<int> spread_costs(const std::vector<int64_t>& costs, int ranks) {
  std::vector<size_t> order(costs.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return costs[a] > costs[b]; });
  std::vector<int> owners(costs.size(), 0);
  std::vector<double> load(static_cast<size_t>(ranks), 0.0);
  for (size_t i : order) {
    const auto least = std::min_element(load.begin(), load.end());
    owners[i] = static_cast<int>(least - load.begin());
    *least += static_cast<double>(costs[i]);
  }
  return owners;
}

void orthogonalise_bucket(const ParamStore& store, const ParamSpace& space, const plan::Bucket& bucket,
                          const std::function<bool(size_t param)>& used, const NewtonSchulz& iteration,
                          const at::Tensor& row) {
  comm::Communicator& ranks = *(space.in_place ? space.ranks().replicas : space.ranks().shard);
  std::vector<int64_t> costs;
  for (int32_t index = bucket.first_param; index <= bucket.last_param; ++index) {
    const auto param = static_cast<size_t>(space.params[index]);
    costs.push_back(used(param) ? cost_of(store.spec(param), iteration) : 0);
  }
  const std::vector<int> owners = spread_costs(costs, ranks.size());
  const std::string& tag = store.spec(space.params[bucket.first_param]).name;
  at::Tensor full = row;
  if (!space.in_place) {
    full = at::empty({space.map.parts * row.numel()}, row.options());
    ranks.all_gather(row, full, tag)->wait();
  }
  for (int32_t index = bucket.first_param; index <= bucket.last_param; ++index) {
    const auto param = static_cast<size_t>(space.params[index]);
    const InBucket matrix(space, bucket, index, full);
    if (used(param) && owners[index - bucket.first_param] == ranks.rank()) {
      matrix.orthogonalise(store.spec(param), iteration);
    } else {
      matrix.zero();
    }
  }
  if (!space.in_place) {
    ranks.reduce_scatter(full, row, tag)->wait();
  } else if (ranks.size() > 1) {
    ranks.all_reduce(row, comm::ReduceOp::kSum, tag)->wait();
  }
}

}  // namespace ds::zero
