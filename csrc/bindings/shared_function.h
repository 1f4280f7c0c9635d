// Python functions that the core calls from threads of its own.
#pragma once
#include <pybind11/pybind11.h>

#include <memory>

namespace ds::bindings {

// A Python function that any thread may call and let go of. After the interpreter's end it does nothing.
inline std::shared_ptr<pybind11::function> shared_function(pybind11::function function) {
  return {new pybind11::function(std::move(function)), [](pybind11::function* held) {
            if (!Py_IsInitialized()) return;  // leaked: there is nobody to give it back to
            pybind11::gil_scoped_acquire locked;
            delete held;
          }};
}

}  // namespace ds::bindings
