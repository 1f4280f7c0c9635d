// Matrices made nearly orthogonal: the quintic Newton-Schulz iteration of Muon (Jordan et al. 2024; Bernstein &
// Newhouse 2024, "Old optimizer, new norm").
//
// X = U / |U|, then `steps` times X <- a X + b (X X') X + c (X X')^2 X with a = 3.4445, b = -4.7750, c = 2.0315.
// Singular values above about 1e-3 of the largest end between 0.68 and 1.21; singular vectors stay. A wide matrix is
// taken as it is and a tall one transposed, so that the products are of the shorter side.
//
// [Note: two forms of the iteration]
// Every step multiplies X from the left by a polynomial P of its Gram matrix G = X X', and these commute. So X need not
// be carried along: with Q = product of all P, and G <- P G P, the result is Q X. With r rows and c columns (r <= c)
// and s steps the standard form costs s (4 r^2 c + 2 r^3) operations, the Gram form 4 r^2 c + (8 s - 6) r^3: less from
// c > 1.5 r on, a third at c = 10 r. It needs fp32: G has squared the singular values, and what rounding makes of the
// small ones (of either sign) grows elevenfold with each step.
//
// Products are torch's own (at::addmm): MKL, OpenBLAS or cuBLAS are faster than a kernel of ours would be, and they are
// the only dependency that orthogonalisation has. Products of 16-bit numbers on the CPU are fp32 products of the same
// numbers, rounded once: torch's own may add in 16 bits there.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "optim/rule.h"

namespace ds::zero {

enum class NewtonSchulzForm { kStandard, kGram };

struct NewtonSchulz {
  int steps = 5;
  // kGram: where it costs less and the products are fp32. See [Note: two forms of the iteration].
  NewtonSchulzForm form = NewtonSchulzForm::kGram;
  // The dtype of the products: unset means fp32 on the CPU and bf16 elsewhere.
  c10::optional<at::ScalarType> dtype;

  // Overwrites `update` (fp32, one matrix or one vector's worth of rows: dimension 0 is the rows, the rest the columns;
  // any strides) with its orthogonalisation times sqrt(max(1, rows / columns)). Zeros stay zeros; a matrix with an inf
  // or nan becomes nan. Ranks that pass the same bits need not get the same bits: one of them computes.
  void apply(const at::Tensor& update) const;
  // The settings of a rule that orthogonalises: its hyperparameters ns_steps and gram.
  static NewtonSchulz of(const optim::Values& hyper);

  // Floating-point operations of apply(), for spreading matrices over ranks.
  int64_t cost(int64_t rows, int64_t cols) const;

 private:
  bool gram(int64_t rows, int64_t cols) const;
};

}  // namespace ds::zero
