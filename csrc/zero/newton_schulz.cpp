#include "zero/newton_schulz.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>

namespace ds::zero {

namespace {

constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;

// B of X <- a X + B X.
at::Tensor polynomial(const at::Tensor& gram) { return at::addmm(gram, gram, gram, kB, kC); }

at::Tensor standard(at::Tensor x, int steps) {
  for (int step = 0; step < steps; ++step) x = at::addmm(x, polynomial(at::mm(x, x.t())), x, kA);
  return x;
}

at::Tensor by_gram(const at::Tensor& x, int steps) {
  at::Tensor gram = at::mm(x, x.t());
  at::Tensor product;  // Q
  for (int step = 0; step < steps; ++step) {
    const at::Tensor b = polynomial(gram);
    if (step + 1 < steps) {
      const at::Tensor left = at::addmm(gram, b, gram, kA);
      gram = at::addmm(left, left, b, kA);
    }
    if (product.defined()) {
      product = at::addmm(product, b, product, kA);
    } else {
      product = b;
      product.diagonal().add_(kA);
    }
  }
  return product.defined() ? at::mm(product, x) : x;
}

}  // namespace

NewtonSchulz NewtonSchulz::of(const optim::Values& hyper) {
  NewtonSchulz iteration;
  iteration.steps = static_cast<int>(hyper["ns_steps"]);
  iteration.form = hyper["gram"] != 0 ? NewtonSchulzForm::kGram : NewtonSchulzForm::kStandard;
  return iteration;
}

bool NewtonSchulz::gram(int64_t rows, int64_t cols) const {
  return form == NewtonSchulzForm::kGram && 2 * std::max(rows, cols) >= 3 * std::min(rows, cols);
}

int64_t NewtonSchulz::cost(int64_t rows, int64_t cols) const {
  const double r = static_cast<double>(std::min(rows, cols)), c = static_cast<double>(std::max(rows, cols));
  const double flops = gram(rows, cols) ? 4 * r * r * c + std::max(0, 8 * steps - 6) * r * r * r
                                        : steps * (4 * r * r * c + 2 * r * r * r);
  return static_cast<int64_t>(std::min(flops, 4e18));
}

void NewtonSchulz::apply(const at::Tensor& update) const {
  at::NoGradGuard no_grad;
  if (update.numel() == 0) return;
  const at::Tensor matrix = update.reshape({update.dim() == 0 ? 1 : update.size(0), -1});
  const int64_t rows = matrix.size(0), cols = matrix.size(1);
  const at::ScalarType type = dtype.value_or(update.is_cpu() ? at::kFloat : at::kBFloat16);
  // The norm over the matrix is fp32 in any case: its scale must not overflow the products' type.
  at::Tensor x = at::div(matrix, at::add(matrix.norm(), 1e-7)).to(type);
  if (rows > cols) x = x.t();
  x = gram(rows, cols) && type == at::kFloat ? by_gram(x, steps) : standard(x, steps);
  if (rows > cols) x = x.t();
  const double longer = static_cast<double>(rows) / static_cast<double>(cols);
  update.copy_(x.reshape(update.sizes()));
  if (longer > 1) update.mul_(std::sqrt(longer));
}

}  // namespace ds::zero
