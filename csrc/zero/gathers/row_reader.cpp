#include "zero/gathers/row_reader.h"

#include <ATen/Functions.h>

namespace ds::zero {

void RowReader::add(const ShardedParam& param, const at::Tensor& rows, const at::Tensor& buffer) {
  if (param.slice_numel() == 0) return;
  if (param.row_codec(values_) == nullptr) {
    const int64_t slices = param.row_slices(values_), bytes = param.row_bytes(values_) / slices;
    buffer.view(at::kByte).view({slices, ranks_, bytes}).copy_(rows.view({ranks_, slices, bytes}).transpose(0, 1));
    return;
  }
  auto* const first = static_cast<uint8_t*>(rows.data_ptr());
  for (int64_t rank = 0; rank < ranks_; ++rank) decode(param, rank, first + rank * rows.stride(0), buffer);
}

void RowReader::add_row(const ShardedParam& param, int64_t rank, const at::Tensor& row, const at::Tensor& buffer) {
  if (param.slice_numel() == 0) return;
  if (param.row_codec(values_) != nullptr) return decode(param, rank, static_cast<uint8_t*>(row.data_ptr()), buffer);
  const int64_t slices = param.row_slices(values_), bytes = param.row_bytes(values_) / slices;
  buffer.view(at::kByte).view({slices, ranks_, bytes}).select(1, rank).copy_(row.view({slices, bytes}));
}

void RowReader::decode(const ShardedParam& param, int64_t rank, uint8_t* row, const at::Tensor& buffer) {
  const SliceCodec* codec = param.row_codec(values_);
  const int64_t slices = param.row_slices(values_), bytes = param.row_bytes(values_) / slices;
  const int64_t numel = param.slice_numel(), width = numel * static_cast<int64_t>(buffer.element_size());
  auto* const to = static_cast<char*>(buffer.data_ptr());
  for (int64_t slice = 0; slice < slices; ++slice)
    coded_[codec].push_back({to + (slice * ranks_ + rank) * width, numel, buffer.scalar_type(), row + slice * bytes});
}

void RowReader::finish() {
  for (const auto& [codec, pairs] : coded_) codec->decode(pairs);
  coded_.clear();
}

}  // namespace ds::zero
