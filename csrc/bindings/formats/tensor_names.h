// The names of tensors in a value, for messages and manifests.
#pragma once
#include <pybind11/pybind11.h>

#include <string>
#include <unordered_map>

namespace ds::bindings {

// {tensor: its path} in dicts, lists and tuples: module.fc.weight, states[0].step. The first path wins.
// pieces_class: what else is a tensor.
std::unordered_map<PyObject*, std::string> tensor_names(const pybind11::object& value,
                                                        const pybind11::object& pieces_class);

}  // namespace ds::bindings
