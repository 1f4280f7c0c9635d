// Takes rows apart that ranks have sent in a gather (ShardedParam::row): slices of parameters, or their codes.
//
// Slice number `s` in the row of rank `r` is slice number s * ranks + r of the parameter: rows of one slice are in the
// order of the ranks, and those of several (hpZ) have one slice of each group of ranks.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <vector>

#include "zero/spaces/sharded_param.h"

namespace ds::zero {

class RowReader {
 public:
  RowReader(Values values, int64_t ranks) : values_(values), ranks_(ranks) {}

  // Rows of all ranks are, one behind the other, the parameter.
  static bool reads_nothing(const ShardedParam& param, Values values) {
    return param.row_codec(values) == nullptr && param.row_slices(values) == 1;
  }

  // `rows`: bytes, a row of the tensor for each rank. `buffer`: gets padded_numel() elements. Both live until finish().
  void add(const ShardedParam& param, const at::Tensor& rows, const at::Tensor& buffer);
  // The row of one rank.
  void add_row(const ShardedParam& param, int64_t rank, const at::Tensor& row, const at::Tensor& buffer);
  // Decodes what was added: few launches for all.
  void finish();

 private:
  void decode(const ShardedParam& param, int64_t rank, uint8_t* row, const at::Tensor& buffer);

  const Values values_;
  const int64_t ranks_;
  std::map<const SliceCodec*, std::vector<SliceCodec::Pair>> coded_;
};

}  // namespace ds::zero
