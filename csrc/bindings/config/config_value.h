// Python objects to configuration values and back.
#pragma once
#include <pybind11/pybind11.h>

#include <vector>

#include "config/value.h"

namespace ds::bindings {

// Dicts, lists, tuples, texts, numbers, booleans and None become JSON. Anything else (torch.dtype, process group,
// callable) is taken out: it goes to `objects`, and its index and repr into the value. Throws Error(kConfig) for keys
// that are not texts and for nesting beyond config::kMaxDepth, which includes an object that contains itself.
config::Value from_python(pybind11::handle object, std::vector<pybind11::object>& objects);
// Puts them back.
pybind11::object to_python(const config::Value& value, const std::vector<pybind11::object>& objects);

}  // namespace ds::bindings
