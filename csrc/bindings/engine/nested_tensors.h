// Tensors inside what modules take and return: tuples, lists, dicts, and objects that hold some.
#pragma once
#include <Python.h>

#include <ATen/core/Tensor.h>

#include <vector>

namespace ds::bindings {

// All tensors in nested lists, tuples, dicts (the outputs of Hugging Face models) and dataclasses, in order.
std::vector<at::Tensor> tensors_in(PyObject* item);

// The same, and also in the attributes of objects of any class, wherever they refer to each other. Each tensor once.
// Objects that are no results of a forward (numbers, texts, classes, functions, modules) are not looked into.
std::vector<at::Tensor> tensors_within(PyObject* item);

}  // namespace ds::bindings
