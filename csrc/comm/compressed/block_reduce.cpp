#include "comm/compressed/block_reduce.h"

#include <ATen/core/Tensor.h>

#include <utility>

#include "base/error.h"

namespace ds::comm {

namespace {

constexpr int kInside = 8, kBetween = 4;  // bits inside a host and between hosts

int64_t aligned_bytes(size_t bytes) { return static_cast<int64_t>((bytes + 15) / 16 * 16); }

DType coded_type(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return DType::kF32;
    case at::kHalf: return DType::kF16;
    case at::kBFloat16: return DType::kBF16;
    default:
      fail(ErrorKind::kType, "blocks of integers: a tensor has dtype ", c10::toString(type),
           "; coded are fp32, fp16 and bf16");
  }
}

char* bytes_of(const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }

}  // namespace

BlockReduce::BlockReduce(CommunicatorPtr ranks, const HostRanks& by_host, int64_t row_numel)
    : ranks_(std::move(ranks)),
      inner_(by_host.inner),
      outer_(by_host.outer),
      row_numel_(row_numel),
      first_bits_(by_host.apart() ? kBetween : kInside) {
  if (!in_two_steps()) {
    for (int r = 0; r < ranks_->size(); ++r) first_.push_back({r});
    return;
  }
  const auto& hosts = by_host.hosts.ranks;
  for (size_t local = 0; local < hosts[0].size(); ++local) {
    first_.emplace_back();
    for (const std::vector<int>& host : hosts) first_.back().push_back(host[local]);
  }
  for (size_t host = 0; host < hosts.size(); ++host) second_.push_back({static_cast<int64_t>(host)});
}

int64_t BlockReduce::codes_bytes(int bits) const {
  return aligned_bytes(code_bytes(kernels::travelling_blocks(bits), static_cast<size_t>(row_numel_)));
}

int64_t BlockReduce::unit_bytes(int bits) const {
  return codes_bytes(bits) +
         aligned_bytes(scale_bytes(kernels::travelling_blocks(bits), static_cast<size_t>(row_numel_)));
}

at::Tensor BlockReduce::encode(const Place& place, int bits, const Exchange& to, const at::Tensor& values,
                               const at::Tensor& error, float beta) const {
  const int64_t unit = unit_bytes(bits), each = static_cast<int64_t>(to[0].size()) * unit;
  const at::Tensor sent = place.memory(each * static_cast<int64_t>(to.size()));
  const int64_t width = static_cast<int64_t>(values.element_size());
  std::vector<kernels::BlockRun> runs;
  char* codes = bytes_of(sent);
  for (const std::vector<int64_t>& rows : to) {
    for (const int64_t row : rows) {
      const int64_t begin = row * row_numel_;
      runs.push_back({bytes_of(values) + begin * width, static_cast<size_t>(row_numel_),
                      reinterpret_cast<uint8_t*>(codes), codes + codes_bytes(bits), nullptr,
                      error.defined() ? error.data_ptr<float>() + begin : nullptr, beta});
      codes += unit;
    }
  }
  place.run([&](const kernels::CodeKernels& kernels, const kernels::Launch& launch) {
    kernels.encode_blocks(launch, kernels::travelling_blocks(bits), coded_type(values.scalar_type()), runs.data(),
                          runs.size());
  });
  return sent;
}

void BlockReduce::decode(const Place& place, int bits, const at::Tensor& got, int64_t parts, int64_t rows,
                         const at::Tensor& out) const {
  const int64_t unit = unit_bytes(bits), width = static_cast<int64_t>(out.element_size());
  std::vector<kernels::BlockSum> runs;
  for (int64_t row = 0; row < rows; ++row) {
    const char* codes = bytes_of(got) + row * unit;
    runs.push_back({bytes_of(out) + row * row_numel_ * width, static_cast<size_t>(row_numel_),
                    reinterpret_cast<const uint8_t*>(codes), codes + codes_bytes(bits), nullptr,
                    static_cast<size_t>(parts), static_cast<size_t>(rows * unit)});
  }
  place.run([&](const kernels::CodeKernels& kernels, const kernels::Launch& launch) {
    kernels.decode_blocks(launch, kernels::travelling_blocks(bits), coded_type(out.scalar_type()), runs.data(),
                          runs.size(), 1.0f, /*add=*/false);
  });
}

WorkPtr BlockReduce::start(const Place& place, const at::Tensor& values, const Errors& errors, Communicator::Tag tag) {
  sent_ = encode(place, first_bits_, first_, values, errors.first, errors.beta);
  got_ = place.memory(sent_.numel());
  return (in_two_steps() ? inner_ : ranks_)->all_to_all(sent_, got_, tag);
}

void BlockReduce::receive(const Place& place, const at::Tensor& out, const Errors& errors) {
  sent_ = at::Tensor();
  const at::Tensor got = std::exchange(got_, at::Tensor());
  const auto parts = static_cast<int64_t>(first_.size()), rows = static_cast<int64_t>(first_[0].size());
  if (!in_two_steps()) return decode(place, first_bits_, got, parts, rows, out);
  const at::Tensor sums = place.memory(rows * row_numel_ * static_cast<int64_t>(sizeof(float))).view(at::kFloat);
  decode(place, first_bits_, got, parts, rows, sums);
  sent_ = encode(place, kBetween, second_, sums, errors.second, errors.beta);
}

void BlockReduce::send_again(const Place& place, Communicator::Tag tag) {
  got_ = place.memory(sent_.numel());
  again_ = outer_->all_to_all(sent_, got_, tag);
}

void BlockReduce::finish(const Place& place, const at::Tensor& out) {
  std::exchange(again_, nullptr)->wait();
  const at::Tensor got = std::exchange(got_, at::Tensor());
  sent_ = at::Tensor();
  decode(place, kBetween, got, static_cast<int64_t>(second_.size()), 1, out);
}

}  // namespace ds::comm
