#include "zero/step/newton_schulz.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>

namespace ds::zero {

namespace {

constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;

// Whether torch may add these products in 16 bits: on the CPU it does on processors and with types for which oneDNN has
// no kernel, and fp16 has no product there at all in torch 1.13. Such products are made in fp32 and rounded once.
bool torch_may_add_in_half(const at::Tensor& x) {
  return x.is_cpu() && (x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf);
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  if (!torch_may_add_in_half(a)) return at::mm(a, b);
  return at::mm(a.to(at::kFloat), b.to(at::kFloat)).to(a.scalar_type());
}

// beta c + alpha a b.
at::Tensor product_and_sum(const at::Tensor& c, const at::Tensor& a, const at::Tensor& b, double beta,
                           double alpha = 1) {
  if (!torch_may_add_in_half(a)) return at::addmm(c, a, b, beta, alpha);
  return at::addmm(c.to(at::kFloat), a.to(at::kFloat), b.to(at::kFloat), beta, alpha).to(a.scalar_type());
}

// B of X <- a X + B X.
at::Tensor polynomial(const at::Tensor& gram) { return product_and_sum(gram, gram, gram, kB, kC); }

at::Tensor standard(at::Tensor x, int steps) {
  for (int step = 0; step < steps; ++step) x = product_and_sum(x, polynomial(product(x, x.t())), x, kA);
  return x;
}

// Only fp32: see [Note: two forms of the iteration].
at::Tensor by_gram(const at::Tensor& x, int steps) {
  at::Tensor gram = at::mm(x, x.t());
  at::Tensor q;
  for (int step = 0; step < steps; ++step) {
    const at::Tensor b = polynomial(gram);
    if (step + 1 < steps) {
      const at::Tensor left = at::addmm(gram, b, gram, kA);
      gram = at::addmm(left, left, b, kA);
    }
    if (q.defined()) {
      q = at::addmm(q, b, q, kA);
    } else {
      q = b;
      q.diagonal().add_(kA);
    }
  }
  return q.defined() ? at::mm(q, x) : x;
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
