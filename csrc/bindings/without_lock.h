// Waits of the core that begin in Python.
#pragma once
#include <pybind11/pybind11.h>

#include <functional>

namespace ds::bindings {

// Runs `wait` without the interpreter's lock, whether or not the caller has it: whom it waits for may need the lock.
inline void without_lock(const std::function<void()>& wait) {
  if (!Py_IsInitialized() || !PyGILState_Check()) {
    wait();
    return;
  }
  pybind11::gil_scoped_release released;
  wait();
}

}  // namespace ds::bindings
