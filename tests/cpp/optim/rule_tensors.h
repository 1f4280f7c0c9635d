// Tensors of an optimizer rule, to run any body of its kernels on and to compare with kernels/ref.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "../kernels/support.h"
#include "optim/rule.h"

namespace ds::optim::test {

using kernels::KernelTable;
using kernels::Launch;
using kernels::StepScale;
using kernels::UpdateArgs;
using kernels::UpdateSegment;
using kernels::test::Buffer;

// Parameter, states, gradient and 16-bit copy of one tensor.
struct Tensor {
  std::vector<Buffer> buffers;  // master, grad, lp, scratch, sums, then the states
  bool with_lp;

  Tensor(const Rule& rule, size_t n, const UpdateArgs& args, unsigned seed, size_t offset = 0, bool lp = true)
      : with_lp(lp) {
    const DType dtypes[] = {args.master_dtype, args.grad_dtype, args.lp_dtype};
    for (int k = 0; k < 3; ++k) buffers.emplace_back(dtypes[k], n, offset);
    for (int k = 0; k < 3; ++k) buffers[k].randomize(seed + k);
    buffers.emplace_back(DType::kF32, rule.scratch ? n : 0, offset);
    buffers.emplace_back(DType::kF64, static_cast<size_t>(rule.sums));
    for (size_t i = 0; i < static_cast<size_t>(rule.sums); ++i) buffers.back().set(i, 0);
    for (const std::string& slot : rule.slots) {
      Buffer state(args.state_dtype, n, offset);
      state.randomize(seed + 7 + static_cast<unsigned>(buffers.size()), 0.1);
      if (slot.find("_sq") != std::string::npos)
        for (size_t i = 0; i < n; ++i) state.set(i, std::abs(state.get(i)));
      buffers.push_back(state);
    }
  }
  size_t numel() const { return buffers[0].size(); }

  // `at(i)`: where buffer i is.
  template <typename At>
  UpdateSegment segment(const At& at, uint64_t stream) {
    UpdateSegment s;
    s.master = at(0);
    s.grad = at(1);
    s.lp = with_lp ? at(2) : nullptr;
    s.scratch = buffers[3].size() > 0 ? static_cast<float*>(at(3)) : nullptr;
    s.sums = buffers[4].size() > 0 ? static_cast<double*>(at(4)) : nullptr;
    for (size_t k = 5; k < buffers.size(); ++k) s.states[k - 5] = at(k);
    s.numel = numel();
    s.stream = stream;
    return s;
  }
  UpdateSegment segment(uint64_t stream = 0) {
    return segment([&](size_t i) { return buffers[i].data(); }, stream);
  }
};

// Without those whose states are packed: adam8bit_test.cpp has them.
inline std::vector<Rule> plain_rules() {
  std::vector<Rule> plain;
  for (const Rule& rule : rules())
    if (!rule.packed) plain.push_back(rule);
  return plain;
}

inline std::vector<double> defaults(const Rule& rule) {
  std::vector<double> hyper;
  for (const Hyperparameter& one : rule.hyper) {
    const bool decay = one.name == "weight_decay", momentum = one.name == "momentum";
    hyper.push_back(decay ? 0.01 : momentum && one.fallback == 0 ? 0.9 : one.fallback);
  }
  return hyper;
}

inline void run(const Rule& rule, const KernelTable& table, const Launch& launch,
                const std::vector<UpdateSegment>& segments, const UpdateArgs& args, const StepScale* scale,
                double step = 3) {
  for (const Pass& pass : rule.passes)
    run_pass(table, launch, rule, pass, segments, args, defaults(rule), step, scale);
}

inline testing::AssertionResult same(const Tensor& got, const Tensor& want) {
  for (size_t i = 0; i < got.buffers.size(); ++i)
    if (auto r = kernels::test::same(got.buffers[i], want.buffers[i]); !r) return r << " (buffer " << i << ")";
  return testing::AssertionSuccess();
}

inline std::string where(const Rule& rule, const KernelTable& table, const UpdateArgs& args, size_t n, size_t offset) {
  return rule.name + " " + table.isa + " master " + dtype_name(args.master_dtype) + " state " +
         dtype_name(args.state_dtype) + " grad " + dtype_name(args.grad_dtype) + " lp " + dtype_name(args.lp_dtype) +
         " n=" + std::to_string(n) + " offset=" + std::to_string(offset);
}

}  // namespace ds::optim::test
