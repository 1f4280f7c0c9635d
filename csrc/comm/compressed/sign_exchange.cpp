#include "comm/compressed/sign_exchange.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <utility>

#include "plan/shard_map.h"

namespace ds::comm {

namespace {

constexpr int64_t kByte = 8;  // elements

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

template <typename T>
T* at_element(const at::Tensor& tensor, int64_t element) {
  return tensor.data_ptr<T>() + element;
}

}  // namespace

int64_t slice_room(int64_t numel, int64_t ranks) { return round_up(plan::slice_numel(numel, ranks), kByte); }

SignExchange::SignExchange(CommunicatorPtr ranks, std::vector<SignPart> parts, bool one_scale,
                           std::function<void(const Call&)> run)
    : ranks_(std::move(ranks)), parts_(std::move(parts)), one_scale_(one_scale), run_(std::move(run)) {
  std::vector<int64_t> numels;
  for (const SignPart& part : parts_) numels.push_back(part.numel);
  const plan::ShardMap cut = plan::param_shards(numels, kByte, ranks_->size(), INT64_MAX);
  for (const plan::Extent& extent : cut.extents) {
    const auto number = static_cast<size_t>(extent.param);
    const SignPart& part = parts_[number];
    const int64_t begin = part.begin + extent.param_offset;
    all_.push_back({begin, extent.numel, number, extent.shard_offset, extent.rank, begin});
    if (extent.rank == ranks_->rank())
      own_.push_back({begin, extent.numel, number, extent.shard_offset, 0, part.owned_begin});
  }
  scales_ = one_scale_ ? 1 : parts_.size();
  bits_bytes_ = round_up(cut.shard_numel / kByte, sizeof(float));
  row_ = bits_bytes_ + static_cast<int64_t>(scales_ * sizeof(float));
}

// The root mean square of what each scale is for.
at::Tensor SignExchange::scales_of(const at::Tensor& values, const at::Tensor& errors,
                                   const std::vector<Run>& runs) const {
  const auto options = at::TensorOptions().dtype(at::kDouble);
  const at::Tensor counts = at::zeros({static_cast<int64_t>(scales_)}, options);
  const at::Tensor sums = at::zeros({static_cast<int64_t>(scales_)}, options.device(values.device()));
  std::vector<kernels::ErrorSum> summed;
  for (const Run& run : runs) {
    summed.push_back({at_element<float>(values, run.begin), at_element<float>(errors, run.error_begin),
                      static_cast<size_t>(run.numel), at_element<double>(sums, scale_of(run.part))});
    *at_element<double>(counts, scale_of(run.part)) += static_cast<double>(run.numel);
  }
  run_([&](const kernels::CodeKernels& codes, const kernels::Launch& launch) {
    codes.sum_squares_with_error(launch, summed.data(), summed.size());
  });
  return sums.div_(counts.clamp_min_(1).to(values.device())).sqrt_().to(at::kFloat);
}

// Signs and scales of the values, of `runs` alone, into their rows.
void SignExchange::encode(const at::Tensor& values, const at::Tensor& errors, const std::vector<Run>& runs,
                          const at::Tensor& rows) const {
  const at::Tensor scales = scales_of(values, errors, runs);
  std::vector<kernels::SignRun> signs;
  for (const Run& run : runs)
    signs.push_back({at_element<float>(values, run.begin), at_element<float>(errors, run.error_begin),
                     static_cast<size_t>(run.numel), at_element<uint8_t>(rows, run.row * row_ + run.bits / kByte),
                     at_element<float>(scales, scale_of(run.part))});
  run_([&](const kernels::CodeKernels& codes, const kernels::Launch& launch) {
    codes.encode_signs(launch, signs.data(), signs.size());
  });
  rows.narrow(1, bits_bytes_, row_ - bits_bytes_)
      .view(at::kFloat)
      .copy_(scales.unsqueeze(0).expand({rows.size(0), -1}));
}

// `values` become the mean over `parts` rows, `stride` bytes apart, of what their signs say.
void SignExchange::decode(const at::Tensor& rows, int64_t stride, size_t parts, const std::vector<Run>& runs,
                          const at::Tensor& values) const {
  std::vector<kernels::SignSum> signs;
  for (const Run& run : runs) {
    const uint8_t* const row = at_element<uint8_t>(rows, run.row * row_);
    const auto* const scales = reinterpret_cast<const float*>(row + bits_bytes_);
    signs.push_back({at_element<float>(values, run.begin), static_cast<size_t>(run.numel), row + run.bits / kByte,
                     scales + scale_of(run.part), parts, static_cast<size_t>(stride)});
  }
  run_([&](const kernels::CodeKernels& codes, const kernels::Launch& launch) {
    codes.decode_signs(launch, signs.data(), signs.size(), 1.0f / static_cast<float>(parts));
  });
}

void SignExchange::mean(const at::Tensor& values, const at::Tensor& errors, const at::Tensor& owned_errors,
                        Communicator::Tag tag) const {
  if (parts_.empty()) return;
  const int64_t ranks = ranks_->size();
  const auto bytes = values.options().dtype(at::kByte);
  const at::Tensor sent = at::zeros({ranks, row_}, bytes), received = at::empty({ranks, row_}, bytes);
  encode(values, errors, all_, sent);
  ranks_->all_to_all(sent, received, tag)->wait();
  // The values have been sent, so their memory is free for the means of this rank's slices.
  const at::Tensor mine = at::zeros({1, row_}, bytes);
  decode(received, row_, static_cast<size_t>(ranks), own_, values);
  encode(values, owned_errors, own_, mine);
  ranks_->all_gather(mine, sent, tag)->wait();
  decode(sent, 0, 1, all_, values);
}

}  // namespace ds::comm
