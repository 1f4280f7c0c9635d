#include "zero/spaces/slice_codec.h"

#include <algorithm>
#include <map>

#include "base/error.h"

namespace ds::zero {

namespace {

// Rows begin, and so do scales, where any type of scale may.
constexpr int64_t kCodeAlign = 16;
int64_t code_aligned(int64_t bytes) { return (bytes + kCodeAlign - 1) / kCodeAlign * kCodeAlign; }

// The runs of kernels by the type of elements: one call for each.
template <typename Run, typename Make>
std::map<at::ScalarType, std::vector<Run>> by_type(const std::vector<SliceCodec::Pair>& pairs, const Make& make) {
  std::map<at::ScalarType, std::vector<Run>> found;
  for (const SliceCodec::Pair& pair : pairs) found[pair.type].push_back(make(pair));
  return found;
}

}  // namespace

SliceCodec::SliceCodec(const kernels::BlockCode& code, c10::Device device, int threads)
    : code_(code), device_(device, threads) {}

SliceCodecPtr SliceCodec::travelling(c10::Device device, int threads) {
  return std::make_shared<SliceCodec>(kernels::travelling_blocks(8), device, threads);
}

SliceCodecPtr SliceCodec::resting(c10::Device device, int threads) {
  return std::make_shared<SliceCodec>(kernels::BlockCode{8, 256, DType::kF32, false}, device, threads);
}

bool SliceCodec::takes(at::ScalarType type) { return type == at::kFloat || type == at::kHalf || type == at::kBFloat16; }

int64_t SliceCodec::code_bytes(int64_t numel) const {
  return code_aligned(static_cast<int64_t>(kernels::code_bytes(code_, static_cast<size_t>(numel))));
}

int64_t SliceCodec::row_bytes(int64_t numel) const {
  return code_bytes(numel) + code_aligned(static_cast<int64_t>(kernels::scale_bytes(code_, static_cast<size_t>(numel))));
}

void SliceCodec::encode(const std::vector<Pair>& pairs) const {
  check();
  const auto make = [&](const Pair& pair) {
    return kernels::BlockRun{
        pair.values, static_cast<size_t>(pair.numel), pair.row, pair.row + code_bytes(pair.numel), nullptr, nullptr, 0};
  };
  for (const auto& [type, runs] : by_type<kernels::BlockRun>(pairs, make))
    device_.run([&, type = type, &runs = runs](const kernels::Launch& launch) {
      device_.codes().encode_blocks(launch, code_, kernel_dtype(type, "slice"), runs.data(), runs.size());
    });
}

void SliceCodec::decode(const std::vector<Pair>& pairs) const {
  const auto make = [&](const Pair& pair) {
    return kernels::BlockSum{
        pair.values, static_cast<size_t>(pair.numel), pair.row, pair.row + code_bytes(pair.numel), nullptr, 1, 0};
  };
  for (const auto& [type, runs] : by_type<kernels::BlockSum>(pairs, make))
    device_.run([&, type = type, &runs = runs](const kernels::Launch& launch) {
      device_.codes().decode_blocks(launch, code_, kernel_dtype(type, "slice"), runs.data(), runs.size(), 1.0f, false);
    });
  check();
}

void SliceCodec::check() const {
  if (device_.failed()) fail(ErrorKind::kRuntime, "slices of parameters could not be coded: ", device_.take_failure());
}

}  // namespace ds::zero
