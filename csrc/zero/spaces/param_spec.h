// The description of a parameter that the engine gets.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "zero/spaces/sharded_param.h"

namespace ds::zero {

// The form in which the gradient of a parameter travels where every rank keeps all of it (stage 0).
enum class GradForm {
  kDense,
  kRows,        // the rows that a backward has touched
  kSparseRows,  // the same rows, which a client optimizer gets as a COO tensor
};

struct ParamSpec {
  at::Tensor tensor;                  // a leaf; its data moves into the flat buffer, the tensor object stays the user's
  std::string name;                   // for messages
  int32_t group;                      // index of its optimizer parameter group
  int32_t order;                      // position in the module: later ones get their gradients earlier
  ShardedParamPtr sharded = nullptr;  // stage 3: the parameter's shard; `tensor` is sharded->tensor()
  GradForm form = GradForm::kDense;
  std::string rule = "dense";  // of the ranks over which it is spread, see spaces/rules/
  std::string copied_along{};  // axis along which an earlier rank trains a copy of it, see add_model_ranks(); or ""
  at::Tensor home = {};        // its view of the flat buffer; undefined for a sharded one. `tensor` may leave it

  int64_t numel() const { return sharded ? sharded->numel() : tensor.numel(); }
  at::IntArrayRef sizes() const { return sharded ? at::IntArrayRef(sharded->sizes()) : whole().sizes(); }
  at::IntArrayRef strides() const { return sharded ? at::IntArrayRef(sharded->strides()) : whole().strides(); }
  c10::Device device() const { return sharded ? sharded->device() : tensor.device(); }
  const at::Tensor& whole() const { return home.defined() ? home : tensor; }
};

}  // namespace ds::zero
