// The kinds of state that each parameter has, by their names in Python.
#pragma once
#include <string>

#include "base/error.h"
#include "zero/offload/placements.h"

namespace ds::bindings {

inline zero::StateKind state_kind(const std::string& name) {
  if (name == "master") return zero::StateKind::kMaster;
  if (name == "grad") return zero::StateKind::kGrad;
  if (name == "slot") return zero::StateKind::kSlot;
  fail(ErrorKind::kValue, "kept is 'master', 'grad' or 'slot', not '", name, "'");
}

}  // namespace ds::bindings
