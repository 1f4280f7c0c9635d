// A listener for gradients that are reduced while backward still runs.
#pragma once
#include <cstdint>
#include <vector>

namespace ds::zero {

class GradArrivals {
 public:
  virtual ~GradArrivals() = default;

  // Whether the gradients of the backward that begins are wanted.
  virtual bool wanted() const = 0;
  // This rank's row of a bucket has all that this backward is known to bring. `used`: the parameters of the bucket of
  // which this rank knows a gradient. From any of autograd's threads; returns at once.
  virtual void arrived(int32_t space, int32_t bucket, const std::vector<int32_t>& used) = 0;
  // The row is about to change once more, or has done so; what reads it has ended when this returns.
  virtual void changed(int32_t space, int32_t bucket) = 0;
  // The backward has ended. What is written to gradients from now on is written by somebody else.
  virtual void ended() = 0;
  // The gradients that have arrived are not those of the step: another backward follows, or this one has raised.
  virtual void withdrawn() = 0;
};

}  // namespace ds::zero
