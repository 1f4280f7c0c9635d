// Conversions between Python's view of torch types and libtorch's that pybind11 has no caster for.
#pragma once
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>
#include <vector>

namespace ds::bindings {

// None -> unset, torch.dtype -> its scalar type.
inline c10::optional<at::ScalarType> optional_dtype(const pybind11::object& dtype) {
  if (dtype.is_none()) return c10::nullopt;
  if (!THPDtype_Check(dtype.ptr())) throw pybind11::type_error("expected a torch.dtype or None");
  return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
}

inline pybind11::object dtype_object(at::ScalarType type) {
  return pybind11::reinterpret_borrow<pybind11::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(type)));
}

// torch 1.13 takes no None for a tensor, and gives none.
inline std::vector<at::Tensor> undefined_for_none(const std::vector<c10::optional<at::Tensor>>& given) {
  std::vector<at::Tensor> tensors;
  for (const auto& one : given) tensors.push_back(one.value_or(at::Tensor()));
  return tensors;
}
inline c10::optional<at::Tensor> none_for_undefined(at::Tensor tensor) {
  return tensor.defined() ? c10::optional<at::Tensor>(std::move(tensor)) : c10::nullopt;
}

}  // namespace ds::bindings
