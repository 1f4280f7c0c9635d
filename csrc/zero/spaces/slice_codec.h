// Slices of parameters as codes of 8 bits: what rests, or travels, instead of their elements.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/codes.h"
#include "zero/device_context.h"

namespace ds::zero {

// A row has the codes of a slice and behind them its scales, as bytes. Calls come from one thread at a time.
class SliceCodec {
 public:
  // `threads`: of the CPU's kernels.
  SliceCodec(const kernels::BlockCode& code, c10::Device device, int threads);

  // In which slices travel between ranks (ZeRO++ qwZ): blocks of 256 elements with a bf16 scale.
  static std::shared_ptr<const SliceCodec> travelling(c10::Device device, int threads);
  // In which frozen slices rest (MixZ++): scales are fp32, so that decoded values of 16 bits have the same codes again.
  static std::shared_ptr<const SliceCodec> resting(c10::Device device, int threads);

  static bool takes(at::ScalarType type);  // elements that can be coded
  int64_t row_bytes(int64_t numel) const;

  // Elements, without gaps, and their row.
  struct Pair {
    void* values;
    int64_t numel;
    at::ScalarType type;
    uint8_t* row;
  };
  static Pair pair(const at::Tensor& values, const at::Tensor& row) {
    return {values.data_ptr(), values.numel(), values.scalar_type(), static_cast<uint8_t*>(row.data_ptr())};
  }
  // Few launches for all. Throw where the device's kernels fail; encode(): the next call does.
  void encode(const std::vector<Pair>& pairs) const;
  void decode(const std::vector<Pair>& pairs) const;

 private:
  int64_t code_bytes(int64_t numel) const;
  void check() const;

  const kernels::BlockCode code_;
  const DeviceContext device_;
};
using SliceCodecPtr = std::shared_ptr<const SliceCodec>;

}  // namespace ds::zero
