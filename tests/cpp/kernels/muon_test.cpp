// Muon's element-wise halves in numbers; that every instruction set gives the bits of the reference is
// tests/cpp/optim/rules_test.cpp, the orthogonalisation tests/cpp/zero/newton_schulz_test.cpp.
#include "kernels/muon.h"

#include "support.h"

namespace ds::kernels::test {
namespace {

void pass(const KernelTable& table, const char* name, const UpdateSegment& segment, const MuonArgs& args,
          const StepScale* scale = nullptr) {
  run_pass(table, name, segment, muon_constants(args), scale);
}

UpdateSegment segment_of(Buffer& master, Buffer& momentum, Buffer& grad, Buffer& scratch) {
  UpdateSegment s;
  s.master = master.data();
  s.states[0] = momentum.data();
  s.grad = grad.data();
  s.scratch = static_cast<float*>(scratch.data());
  s.numel = master.size();
  return s;
}

TEST(MuonTest, ASkippedStepTouchesNothing) {
  const StepScale skip = {INFINITY, 1.0f, 1};
  std::vector<const KernelTable*> tables = isa_tables();
  tables.push_back(&ref_table());
  for (const KernelTable* table : tables) {
    Buffer a(DType::kF32, 100), b(DType::kF32, 100), c(DType::kF32, 100), d(DType::kF32, 100);
    const Buffer a0 = a.randomize(1), b0 = b.randomize(2), c0 = c.randomize(3), d0 = d.randomize(4);
    for (const char* name : {"muon_momentum", "muon"})
      pass(*table, name, segment_of(a, b, c, d), {0.1, 0.9, 0.1, true}, &skip);
    EXPECT_TRUE(same(a, a0) && same(b, b0) && same(c, c0) && same(d, d0)) << table->isa;
  }
}

// The formulas of kernels/muon.h in fp64, over several steps.
TEST(MuonTest, StaysCloseToFp64) {
  for (const KernelTable* table : isa_tables()) {
    for (bool nesterov : {true, false}) {
      const size_t n = 301;
      Buffer momentum(DType::kF32, n), grad(DType::kF32, n), scratch(DType::kF32, n), master(DType::kF32, n);
      for (size_t i = 0; i < n; ++i) momentum.set(i, 0);
      master.randomize(3);
      std::vector<double> m(n), p = master.values();
      for (unsigned step = 0; step < 100; ++step) {
        grad.randomize(100 + step);
        for (const char* name : {"muon_momentum", "muon"})
          pass(*table, name, segment_of(master, momentum, grad, scratch), {0.02, 0.95, 0.1, nesterov});
        for (size_t i = 0; i < n; ++i) {
          const double g = grad.get(i);
          m[i] = 0.95 * m[i] + 0.05 * g;
          const double u = nesterov ? 0.05 * g + 0.95 * m[i] : m[i];
          ASSERT_NEAR(scratch.get(i), u, 3e-7) << table->isa << " " << nesterov;
          p[i] -= 0.02 * u + 0.02 * 0.1 * p[i];
        }
      }
      EXPECT_LE(relative_error(master, p), 1e-6) << table->isa;
    }
  }
}

}  // namespace
}  // namespace ds::kernels::test
