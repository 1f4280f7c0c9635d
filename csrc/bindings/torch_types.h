// Conversions between Python's view of torch types and libtorch's that pybind11 has no caster for.
#pragma once
#include <torch/csrc/Dtype.h>
#include <torch/csrc/utils/pybind.h>

namespace ds::bindings {

// None -> unset, torch.dtype -> its scalar type.
inline c10::optional<at::ScalarType> optional_dtype(const pybind11::object& dtype) {
  if (dtype.is_none()) return c10::nullopt;
  if (!THPDtype_Check(dtype.ptr())) throw pybind11::type_error("expected a torch.dtype or None");
  return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
}

}  // namespace ds::bindings
