// An argument that is the path of a file: text, bytes or os.PathLike, as Python's own functions take it.
#pragma once
#include <pybind11/pybind11.h>

#include <string>

namespace ds::bindings {

// The bytes that the system knows the path by. Text with bytes that are not UTF-8 has them as os.fsdecode made it.
struct FsPath {
  std::string bytes;
  operator const std::string&() const { return bytes; }  // NOLINT(google-explicit-constructor): used as a path
};

}  // namespace ds::bindings

namespace pybind11::detail {

template <>
struct type_caster<ds::bindings::FsPath> {
  PYBIND11_TYPE_CASTER(ds::bindings::FsPath, const_name("str | bytes | os.PathLike"));

  bool load(handle source, bool) {
    PyObject* made = nullptr;
    if (PyUnicode_FSConverter(source.ptr(), &made) == 0) {
      PyErr_Clear();
      return false;
    }
    const auto held = reinterpret_steal<object>(made);
    value.bytes.assign(PyBytes_AS_STRING(made), static_cast<size_t>(PyBytes_GET_SIZE(made)));
    return true;
  }
};

}  // namespace pybind11::detail
