// A plain model of one exchange of signs, for tests: all ranks in one place.
#pragma once
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <vector>

#include "plan/shard_map.h"

namespace ds::comm {

using Tensors = std::vector<at::Tensor>;

inline at::Tensor signs_of(const at::Tensor& values) {
  return at::where(values.ge(0), at::ones_like(values), -at::ones_like(values));
}

// The values that a receiver decodes, one tensor for each parameter. `errors` take what is lost.
inline Tensors decoded_of(const Tensors& values, const Tensors& errors, bool one_scale) {
  at::Tensor squares = at::zeros({}, at::kDouble);
  int64_t count = 0;
  for (const at::Tensor& one : values) {
    squares = squares + one.square().sum();
    count += one.numel();
  }
  Tensors decoded;
  for (size_t i = 0; i < values.size(); ++i) {
    const at::Tensor mean = one_scale ? squares / std::max<int64_t>(1, count)
                                      : values[i].square().sum() / std::max<int64_t>(1, values[i].numel());
    decoded.push_back(signs_of(values[i]) * mean.sqrt().to(at::kFloat).to(values[i].scalar_type()));
    errors[i].copy_(values[i] - decoded.back());
  }
  return decoded;
}

// The mean that all ranks have afterwards, of each parameter. `given`, `errors` and `owned` (errors of slices, perhaps
// longer than these) are those of each rank and each parameter: one-dimensional, in fp64. Errors are updated.
inline Tensors mean_of_signs(const std::vector<Tensors>& given, const std::vector<Tensors>& errors,
                             const std::vector<Tensors>& owned, bool one_scale) {
  const auto ranks = static_cast<int64_t>(given.size());
  std::vector<Tensors> decoded;
  for (size_t rank = 0; rank < given.size(); ++rank) {
    Tensors values;
    for (size_t i = 0; i < given[rank].size(); ++i) values.push_back(given[rank][i] + errors[rank][i]);
    decoded.push_back(decoded_of(values, errors[rank], one_scale));
  }
  Tensors mean;
  for (const at::Tensor& one : given[0]) mean.push_back(at::zeros_like(one));
  for (int64_t owner = 0; owner < ranks; ++owner) {
    Tensors values, kept, targets;
    for (size_t i = 0; i < mean.size(); ++i) {
      const int64_t slice = plan::slice_numel(mean[i].numel(), ranks), begin = std::min(mean[i].numel(), owner * slice);
      const int64_t numel = std::min(slice, mean[i].numel() - begin);
      at::Tensor sum = at::zeros({numel}, mean[i].options());
      for (const Tensors& one : decoded) sum = sum + one[i].narrow(0, begin, numel);
      kept.push_back(owned[owner][i].narrow(0, 0, numel));
      values.push_back(sum / ranks + kept.back());
      targets.push_back(mean[i].narrow(0, begin, numel));
    }
    const Tensors found = decoded_of(values, kept, one_scale);
    for (size_t i = 0; i < found.size(); ++i) targets[i].copy_(found[i]);
  }
  return mean;
}

inline double largest_difference(const at::Tensor& a, const at::Tensor& b) {
  return a.numel() == 0 ? 0 : (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

}  // namespace ds::comm
