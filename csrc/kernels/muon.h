// The element-wise halves of Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"): the
// pass "muon_momentum" before, and the pass "muon" after the orthogonalisation of whole matrices
// (csrc/zero/step/newton_schulz.h). State: 0 momentum. What is orthogonalised goes through UpdateSegment::scratch.
//
// Per element, in fp32; with g = grad * scale->grad_scale:
//   muon_momentum:  m += (1 - beta) * (g - m)
//                   scratch = m                          nesterov: g + beta * (m - g)
//   muon:           d = lr * scratch + lr * weight_decay * p
//                   p -= d
#pragma once

namespace ds::kernels {

struct MuonArgs {
  double lr, beta, weight_decay;
  bool nesterov;
};

// The block of UpdateArgs::constants: rounded to fp32 in one place so that every body uses the same ones.
struct MuonConstants {
  float lr, decay;   // decay: lr * weight_decay
  float move, beta;  // move: 1 - beta
  bool nesterov;
};

inline MuonConstants muon_constants(const MuonArgs& a) {
  return {static_cast<float>(a.lr), static_cast<float>(a.lr * a.weight_decay), static_cast<float>(1.0 - a.beta),
          static_cast<float>(a.beta), a.nesterov};
}

}  // namespace ds::kernels
