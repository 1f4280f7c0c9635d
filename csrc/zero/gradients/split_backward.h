// A backward in two halves: gradients of inputs, which somebody waits for, and of weights, which nobody does.
//
// [Note: what the halves do]
// A *boundary* is a node of the graph that leads to inputs and, by another edge, to weights alone. The first half runs
// the nodes that lead to inputs and keeps what comes into boundaries. The second half starts at all boundaries at once,
// with the edges that lead to inputs cut, so every node there runs once, whatever weights have in common: a weight that
// is used twice gets one sum, as in a whole backward. Each product of autograd's own nodes is computed in one half
// only.
//
// [Note: what cannot be split]
// Nodes that are not autograd's own (functions of users) and nodes with hooks are run once, with all that they give:
// weights below them have their gradients in the first half. With a re-entrant checkpoint among them, which runs a
// backward of its own, everything is in the first half; without inputs that want gradients everything is in the second.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace ds::zero {

class SplitBackward {
 public:
  // Prepares the graph on which `outputs` hang, with the gradients `grads` of these. `inputs`: leaves that want
  // gradients.
  SplitBackward(const std::vector<at::Tensor>& outputs, std::vector<at::Tensor> grads,
                const std::vector<at::Tensor>& inputs);
  ~SplitBackward();
  SplitBackward(const SplitBackward&) = delete;

  void run_inputs();          // once; .grad of the inputs
  void run_weights();         // once, afterwards; .grad of the weights
  bool nothing_left() const;  // run_inputs does everything

 private:
  struct Halves;
  std::unique_ptr<Halves> halves_;
};

}  // namespace ds::zero
