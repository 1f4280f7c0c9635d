// The extension module: collects what the other files of this room registered, and translates errors.
#include "base/blocking_region.h"
#include "base/error.h"
#include "bindings/registry.h"

namespace py = pybind11;

namespace ds::bindings {

std::vector<Binder>& binders() {
  static std::vector<Binder> all;
  return all;
}

namespace {

PyObject* python_type(ErrorKind kind, PyObject* config_error) {
  switch (kind) {
    case ErrorKind::kConfig: return config_error;
    case ErrorKind::kValue: return PyExc_ValueError;
    case ErrorKind::kType: return PyExc_TypeError;
    case ErrorKind::kKey: return PyExc_KeyError;
    case ErrorKind::kIndex: return PyExc_IndexError;
    case ErrorKind::kAssertion: return PyExc_AssertionError;
    case ErrorKind::kNotImplemented: return PyExc_NotImplementedError;
    case ErrorKind::kRuntime: break;
  }
  return PyExc_RuntimeError;
}

void without_interpreter_lock(const std::function<void()>& wait) {
  if (!Py_IsInitialized() || !PyGILState_Check()) {
    wait();
    return;
  }
  py::gil_scoped_release unlocked;
  wait();
}

PyObject* config_error_type = nullptr;  // owned by the module, which Python never unloads

}  // namespace
}  // namespace ds::bindings

PYBIND11_MODULE(_C, m) {
  using namespace ds::bindings;
  m.doc() = "Native core of deepspeed. Import it through deepspeed._native only.";
  config_error_type = PyErr_NewExceptionWithDoc(
      "deepspeed.DeepSpeedConfigError", "A configuration is wrong; the message names the key, its value and the fix.",
      PyExc_ValueError, nullptr);
  m.attr("DeepSpeedConfigError") = py::handle(config_error_type);
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const ds::Error& e) {
      PyErr_SetString(python_type(e.kind(), config_error_type), e.what());
    }
  });
  ds::set_blocking_region(without_interpreter_lock);
  for (Binder bind : binders()) bind(m);
}
