#include "zero/gradients/one_use.h"

#include <algorithm>

#include "zero/gradients/grad_reducer.h"

namespace ds::zero {

namespace {

thread_local OneUse* outermost = nullptr;

}  // namespace

OneUse* OneUse::here() { return outermost; }

void OneUse::begin() {
  if (!outermost) outermost = this;
}

void OneUse::add(GradReducer& reducer, size_t param) {
  const std::pair<GradReducer*, size_t> use(&reducer, param);
  if (std::find(used_.begin(), used_.end(), use) == used_.end()) used_.push_back(use);
}

void OneUse::end(bool complete) {
  if (outermost != this) return;
  outermost = nullptr;
  for (const auto& [reducer, param] : std::exchange(used_, {}))
    if (complete) reducer->end_use(param);
}

}  // namespace ds::zero
