// Gradients that belong to one use of their parameters.
//
// [Note: one use]
// A function that runs a module tile by tile (deepspeed.sequence) makes a gradient of each parameter for each tile. The
// number of tiles depends on the length of the sequence, and labels tell which of them have gradients. So while a
// OneUse lives, the gradients that arrive in its thread are added up as always, and all of them are one use of their
// parameter, which has come when the OneUse ends. A OneUse inside another one is a part of that one.
#pragma once
#include <cstddef>
#include <utility>
#include <vector>

namespace ds::zero {

class GradReducer;

class OneUse {
 public:
  static OneUse* here();  // that of this thread; null: none
  void begin();
  void add(GradReducer& reducer, size_t param);
  void end(bool complete);  // in the thread of begin(); not `complete`: the backward has raised

 private:
  std::vector<std::pair<GradReducer*, size_t>> used_;  // each parameter once
};

}  // namespace ds::zero
