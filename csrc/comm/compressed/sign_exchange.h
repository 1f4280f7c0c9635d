// The mean over the ranks of values that travel as signs (Tang et al. 2021, arXiv 2102.02888).
//
// [Note: one exchange of signs]
// Each parameter is cut into a slice for each rank (plan::param_shards), its owner. A rank adds its own error to its
// values, and sends to each owner the signs of that one's slices and the scale of each parameter, the root mean square
// of its elements: one all_to_all of rows of bytes. What the signs have lost becomes the error. The owner takes the
// mean of what all ranks have sent, in rank order, adds the error that it has as an owner, and sends signs and the
// scales of its slices to all ranks in the same way: one all_gather. All ranks, the owner too, compute with what these
// signs say, so all of them have the same bits. Rows have padding, which counts neither in scales nor in errors.
//
// For N ranks a rank sends 2 (N - 1) / N bits for each element and 4 bytes for each scale.
#pragma once
#include <functional>
#include <vector>

#include "comm/communicator.h"
#include "kernels/codes.h"

namespace ds::comm {

// A parameter of an exchange. The slice of an owner has room for slice_room() errors.
struct SignPart {
  int64_t begin;        // of its elements in the values, and in their errors
  int64_t numel;        // may be 0
  int64_t owned_begin;  // of this rank's slice in the owner's errors
};

// Elements of a slice, rounded up so that the bits of the next one begin at a byte.
int64_t slice_room(int64_t numel, int64_t ranks);

class SignExchange {
 public:
  using Call = std::function<void(const kernels::CodeKernels&, const kernels::Launch&)>;

  // `one_scale`: all parameters share the scale of what a rank sends. `run` calls a function with the kernels of the
  // device that has the values.
  SignExchange(CommunicatorPtr ranks, std::vector<SignPart> parts, bool one_scale,
               std::function<void(const Call&)> run);

  // The values of the parts become their mean over the ranks. All tensors are fp32 and of one device: `errors` of this
  // rank's values, `owned_errors` of its slices. Collective.
  void mean(const at::Tensor& values, const at::Tensor& errors, const at::Tensor& owned_errors,
            Communicator::Tag tag) const;

 private:
  // A run of elements that belong to one part.
  struct Run {
    int64_t begin, numel;  // in the values
    size_t part;
    int64_t bits;  // of its first element in a row
    int64_t row;   // of a tensor of rows
    int64_t error_begin;
  };

  at::Tensor scales_of(const at::Tensor& values, const at::Tensor& errors, const std::vector<Run>& runs) const;
  void encode(const at::Tensor& values, const at::Tensor& errors, const std::vector<Run>& runs,
              const at::Tensor& rows) const;
  void decode(const at::Tensor& rows, int64_t stride, size_t parts, const std::vector<Run>& runs,
              const at::Tensor& values) const;
  size_t scale_of(size_t part) const { return one_scale_ ? 0 : part; }

  const CommunicatorPtr ranks_;
  const std::vector<SignPart> parts_;
  const bool one_scale_;
  const std::function<void(const Call&)> run_;
  size_t scales_ = 0;                 // in a row
  int64_t bits_bytes_ = 0, row_ = 0;  // of a row
  std::vector<Run> all_, own_;        // of the slices of all ranks in the values; of this rank's, end to end
};

}  // namespace ds::comm
