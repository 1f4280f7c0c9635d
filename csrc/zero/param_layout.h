// How a parameter's elements are ordered in a flat buffer.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

namespace ds::zero {

// Strides under which the elements fill one block of memory: the tensor's own (channels_last stays so) where they do.
std::vector<int64_t> kept_strides(const at::Tensor& tensor);

}  // namespace ds::zero
