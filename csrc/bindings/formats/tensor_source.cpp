#include "bindings/formats/tensor_source.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cstring>

#include "storage/pinned.h"

namespace ds::bindings {
namespace {

std::vector<int64_t> row_major_strides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size());
  int64_t step = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = step;
    step = sizes::product("elements of a tensor", step, std::max<int64_t>(shape[i], 1));
  }
  return strides;
}

// Elements of `tensor` (at most staging.bytes) in row-major order, valid until the next call.
at::Tensor staged(io::Staging& staging, const at::Tensor& tensor) {
  std::shared_ptr<void>& memory = tensor.is_cpu() ? staging.pageable : staging.pinned;
  if (memory == nullptr) {
    const auto options = storage::host_options(tensor.device()).dtype(at::kByte);
    memory = std::make_shared<at::Tensor>(at::empty({static_cast<int64_t>(staging.bytes)}, options));
  }
  void* data = static_cast<at::Tensor*>(memory.get())->data_ptr();
  return at::from_blob(data, tensor.sizes(), at::TensorOptions(tensor.scalar_type())).copy_(tensor);
}

// Calls take(part) for the tensor cut along its first dimensions, in row-major order, into parts of at most `most`
// elements.
template <typename Take>
void each_part(const at::Tensor& tensor, int64_t most, const Take& take) {
  if (tensor.numel() <= most) {
    take(tensor);
    return;
  }
  const int64_t row = tensor.numel() / tensor.size(0);
  const int64_t rows = row > most ? 1 : most / row;
  for (int64_t begin = 0; begin < tensor.size(0); begin += rows) {
    const at::Tensor part = tensor.narrow(0, begin, std::min(rows, tensor.size(0) - begin));
    if (row > most) {
      each_part(part.select(0, 0), most, take);
    } else {
      take(part);
    }
  }
}

}  // namespace

TensorSource::TensorSource(const at::Tensor& given, bool row_major) {
  const at::Tensor tensor = given.detach();
  shape_ = tensor.sizes().vec();
  stride_ = tensor.strides().vec();
  numel_ = tensor.numel();
  const bool lazy = tensor.is_conj() || tensor.is_neg(), in_order = tensor.is_contiguous();
  int64_t span = in_order ? numel_ : 1;
  for (size_t i = 0; !in_order && i < shape_.size(); ++i) span += (shape_[i] - 1) * stride_[i];
  std::string way;
  if (span <= numel_ && !lazy && (in_order || !row_major)) {
    flat_ = tensor.as_strided({span}, {1});
    numel_ = span;
  } else {
    rows_ = tensor;
    for (const auto& numbers : {shape_, stride_}) {
      for (const int64_t number : numbers) way += std::to_string(number) + ",";
      way += ";";
    }
    way += tensor.is_conj() ? "c" : "";
    way += tensor.is_neg() ? "n" : "";
    stride_ = row_major_strides(shape_);
  }
  // Tensors without elements have no address that would tell them apart.
  const void* address = numel_ > 0 ? tensor.data_ptr() : static_cast<const void*>(this);
  key_ = tensor.device().str() + " " + std::to_string(reinterpret_cast<uintptr_t>(address)) + " " +
         std::to_string(static_cast<int>(tensor.scalar_type())) + " " + std::to_string(bytes()) + " " + way;
}

void TensorSource::each(io::Staging& staging, const io::TakePiece& take) const {
  if (numel_ == 0) return;
  if (in_place() && !staging.always) {
    take(flat_.data_ptr(), bytes());
    return;
  }
  const auto most = static_cast<int64_t>(staging.bytes / tensor().element_size());
  each_part(tensor(), most, [&](const at::Tensor& part) {
    const at::Tensor copied = staged(staging, part);
    take(copied.data_ptr(), static_cast<uint64_t>(copied.nbytes()));
  });
}

void TensorSource::copy_range(char* to, uint64_t begin, uint64_t end) const {
  if (begin == end) return;
  if (in_place()) {
    std::memcpy(to, static_cast<const char*>(flat_.data_ptr()) + begin, end - begin);
    return;
  }
  const at::TensorOptions bytes_on_host(at::kByte);
  if (begin == 0 && end == bytes()) {
    at::from_blob(to, tensor().sizes(), bytes_on_host.dtype(tensor().scalar_type())).copy_(tensor(), true);
    return;
  }
  const at::Tensor flat = flat_.defined() ? flat_ : rows_.resolve_conj().resolve_neg().contiguous().reshape({-1});
  const at::Tensor cut = flat.view(at::kByte).slice(0, static_cast<int64_t>(begin), static_cast<int64_t>(end));
  at::from_blob(to, cut.sizes(), bytes_on_host).copy_(cut, true);
}

}  // namespace ds::bindings
