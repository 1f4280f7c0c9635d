#include "comm/decorators/quantized.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <utility>
#include <vector>

#include "base/error.h"
#include "comm/calls/compose.h"
#include "comm/decorators/forwarding.h"

namespace ds::comm {

namespace {

// Scales, one for each block, then the codes, one byte for each element.
class BlockwiseInt8 : public Codec {
 public:
  BlockwiseInt8(int64_t block, at::ScalarType scales) : block_(block), scales_(scales) {
    if (block < 1) fail(ErrorKind::kValue, "blocks of ", block, " elements: give 1 or more");
    if (scales != at::kFloat && scales != at::kHalf)
      fail(ErrorKind::kType, "scales of ", c10::toString(scales), ": give Float or Half");
  }

  std::string name() const override { return "int8 in blocks of " + std::to_string(block_); }
  bool takes(at::ScalarType type) const override {
    return type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
  }
  int64_t packed_bytes(int64_t numel) const override { return (scale_bytes(numel) + numel + 7) / 8 * 8; }

  void pack(const at::Tensor& values, const at::Tensor& packed) const override {
    const int64_t numel = values.numel(), n = blocks(numel);
    if (numel == 0) return;
    const at::Tensor padded = at::zeros({n * block_}, values.options().dtype(at::kFloat));
    padded.narrow(0, 0, numel).copy_(values.view({-1}));
    const at::Tensor rows = padded.view({n, block_});
    const at::Tensor scales = packed.narrow(0, 0, scale_bytes(numel)).view(scales_).narrow(0, 0, n);
    scales.copy_(rows.abs().amax({1}) / 127.0);
    const at::Tensor by = scales.to(at::kFloat).unsqueeze(1);  // as those who unpack see them
    const at::Tensor codes = at::where(by > 0, rows / by, at::zeros_like(rows)).nan_to_num(0.0, 0.0, 0.0);
    packed.narrow(0, scale_bytes(numel), numel)
        .view(at::kChar)
        .copy_(codes.round_().clamp_(-127, 127).view({-1}).narrow(0, 0, numel));
  }

  void unpack(const at::Tensor& packed, const at::Tensor& values) const override {
    const int64_t numel = values.numel(), n = blocks(numel);
    if (numel == 0) return;
    const at::Tensor padded = at::zeros({n * block_}, values.options().dtype(at::kFloat));
    padded.narrow(0, 0, numel).copy_(packed.narrow(0, scale_bytes(numel), numel).view(at::kChar));
    padded.view({n, block_})
        .mul_(packed.narrow(0, 0, scale_bytes(numel)).view(scales_).narrow(0, 0, n).to(at::kFloat).unsqueeze(1));
    values.view({-1}).copy_(padded.narrow(0, 0, numel));
  }

  double bound(double peak) const override {
    // Half a step. A scale in 16 bits is off by 2^-11 of itself, for up to 127 steps, or by 2^-25 where it is tiny.
    const bool half = scales_ == at::kHalf;
    return peak / 127 * (half ? 0.5 + 127.0 / 2048 : 0.5 + 1e-4) + (half ? 127.0 / (1 << 25) : 0.0);
  }

 private:
  int64_t blocks(int64_t numel) const { return (numel + block_ - 1) / block_; }
  int64_t scale_bytes(int64_t numel) const {
    const int64_t bytes = blocks(numel) * static_cast<int64_t>(c10::elementSize(scales_));
    return (bytes + 7) / 8 * 8;
  }

  const int64_t block_;
  const at::ScalarType scales_;
};

class QuantizedCommunicator : public ForwardingCommunicator {
 public:
  QuantizedCommunicator(CommunicatorPtr inner, CodecPtr codec)
      : ForwardingCommunicator(std::move(inner)), codec_(std::move(codec)) {}

 protected:
  WorkPtr start(const Op& op) override {
    const bool even = op.in_counts.empty() && op.out_counts.empty() && size() > 1;
    if (even && op.verb == Verb::kAllGather && codec_->takes(op.in.scalar_type())) return all_gather(op);
    if (even && op.verb == Verb::kReduceScatter && codec_->takes(op.in.scalar_type()) &&
        (op.reduce == ReduceOp::kSum || op.reduce == ReduceOp::kAvg))
      return reduce_scatter(op);
    return inner_->run(op);
  }

 private:
  Op packed_op(const Op& op, at::Tensor in, at::Tensor out, Verb verb) const {
    return {verb, std::move(in), std::move(out), {}, {}, op.reduce, op.peer, op.tag, op.wait};
  }
  static at::Tensor bytes(int64_t numel, const at::Tensor& like) {
    return at::empty({numel}, like.options().dtype(at::kByte));
  }

  WorkPtr all_gather(const Op& op) const {
    const int64_t width = codec_->packed_bytes(op.in.numel());
    const at::Tensor mine = bytes(width, op.in), all = bytes(width * size(), op.in);
    codec_->pack(op.in, mine);
    const WorkPtr work = inner_->run(packed_op(op, mine, all, Verb::kAllGather));
    return std::make_shared<JoinedWork>(
        std::vector<WorkPtr>{work}, [codec = codec_, mine, all, rows = parts_of(op.out, {}, size()), width] {
          for (size_t r = 0; r < rows.size(); ++r)
            codec->unpack(all.narrow(0, static_cast<int64_t>(r) * width, width), rows[r]);
        });
  }

  WorkPtr reduce_scatter(const Op& op) const {
    const std::vector<at::Tensor> rows = parts_of(op.in, {}, size());
    const int64_t width = codec_->packed_bytes(op.out.numel());
    const at::Tensor give = bytes(width * size(), op.in), take = bytes(width * size(), op.in);
    for (size_t r = 0; r < rows.size(); ++r)
      codec_->pack(rows[r], give.narrow(0, static_cast<int64_t>(r) * width, width));
    const WorkPtr work = inner_->run(packed_op(op, give, take, Verb::kAllToAll));
    return std::make_shared<JoinedWork>(
        std::vector<WorkPtr>{work},
        [codec = codec_, give, take, own = rows[rank()], out = op.out, op = op.reduce, me = rank(), n = size(), width] {
          const at::Tensor sum = at::zeros({out.numel()}, out.options().dtype(at::kFloat));
          const at::Tensor row = at::empty_like(sum);
          for (int r = 0; r < n; ++r) {
            if (r == me) {
              row.copy_(own);
            } else {
              codec->unpack(take.narrow(0, r * width, width), row);
            }
            at::Tensor(sum).add_(row);
          }
          if (op == ReduceOp::kAvg) at::Tensor(sum).div_(n);
          out.view({-1}).copy_(sum);
        });
  }

  const CodecPtr codec_;
};

}  // namespace

CodecPtr blockwise_int8(int64_t block, at::ScalarType scales) { return std::make_shared<BlockwiseInt8>(block, scales); }

CommunicatorPtr quantized(CommunicatorPtr inner, CodecPtr codec) {
  return std::make_shared<QuantizedCommunicator>(std::move(inner), std::move(codec));
}

}  // namespace ds::comm
