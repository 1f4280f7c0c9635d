// Gradients of which a backward touches a few rows: those of embeddings.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>

#include "comm/communicator.h"

namespace ds::zero {

// Numbers of the rows of `grad`, along its first dimension, that are not all zero. A nan is not zero.
at::Tensor touched_rows(const at::Tensor& grad);

// `grad` as a COO tensor of its touched rows.
at::Tensor as_sparse(const at::Tensor& grad);

// `grad` becomes its sum over the ranks, times `scale`. What travels, as `wire`, are numbers and values of touched
// rows, from every rank to every rank; if that costs more than an all-reduce, it is an all-reduce. Rows
// are added in rank order: every rank gets the same bits. All ranks call it, for a tensor of the same shape.
void reduce_rows(comm::Communicator& communicator, const at::Tensor& grad, float scale, at::ScalarType wire,
                 const std::string& tag);

}  // namespace ds::zero
