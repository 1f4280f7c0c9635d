// A Communicator whose gathers and reduce-scatters of floating-point tensors travel packed: fewer bytes, an error that
// the codec bounds. For weights and gradients that are gathered and reduced in low precision (ZeRO++: qwZ, qgZ).
#pragma once
#include <memory>
#include <string>

#include "comm/communicator.h"

namespace ds::comm {

// A code that turns elements into bytes and back. Stateless: any thread, any device, equal inputs give equal bytes.
class Codec {
 public:
  virtual ~Codec() = default;
  virtual std::string name() const = 0;
  virtual bool takes(at::ScalarType type) const = 0;  // others travel as they are
  // Of `numel` elements, whatever their type; a multiple of 8, so that packed rows that follow each other are aligned.
  virtual int64_t packed_bytes(int64_t numel) const = 0;
  // `packed`: contiguous uint8 of packed_bytes(numel), starting at a multiple of 8. `values`: contiguous.
  virtual void pack(const at::Tensor& values, const at::Tensor& packed) const = 0;
  virtual void unpack(const at::Tensor& packed, const at::Tensor& values) const = 0;  // rounds to the type of `values`
  // No element of a tensor whose finite elements are at most `peak` in size comes back farther away than this, before
  // the last rounding. A block with an element that is not finite comes back as NaN.
  virtual double bound(double peak) const = 0;
};
using CodecPtr = std::shared_ptr<const Codec>;

// 8-bit integers, symmetric around zero, with a scale for each `block` elements: the largest becomes 127.
// `scales`: kFloat, or kHalf for half their bytes, where elements up to 8e6 in size fit.
CodecPtr blockwise_int8(int64_t block = 2048, at::ScalarType scales = at::kFloat);

// all_gather with equal counts: every rank packs its part, all unpack all parts, their own included: all ranks have the
// same bits. reduce_scatter (sum, avg) with equal counts: every rank packs each row by itself, rows travel by
// all_to_all, and are added in rank order in fp32, the own one exact: the error is at most that of size() - 1 rows.
// Everything else, and types that the codec does not take, passes as it is.
CommunicatorPtr quantized(CommunicatorPtr inner, CodecPtr codec);

}  // namespace ds::comm
