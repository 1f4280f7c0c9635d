#include "bindings/config/config_value.h"

#include "base/error.h"
#include "config/document.h"

namespace py = pybind11;

namespace ds::bindings {

namespace {

std::string utf8(py::handle text) {
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (!data) {
    PyErr_Clear();
    fail(ErrorKind::kConfig, "config: a text holds half of a surrogate pair, which UTF-8 cannot write.");
  }
  return std::string(data, static_cast<size_t>(size));
}

std::string repr_of(py::handle object) {
  PyObject* text = PyObject_Repr(object.ptr());
  if (!text) {
    PyErr_Clear();
    return std::string("<") + Py_TYPE(object.ptr())->tp_name + " object>";
  }
  const auto owner = py::reinterpret_steal<py::object>(text);
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(text, &size);
  if (!data) PyErr_Clear();
  return data ? std::string(data, static_cast<size_t>(std::min<Py_ssize_t>(size, 200))) : "<object>";
}

config::Value convert(py::handle object, std::vector<py::object>& objects, int depth);

config::Value from_int(py::handle object) {
  int overflow = 0;
  const long long v = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
  if (overflow == 0) return static_cast<int64_t>(v);
  const double wide = PyLong_AsDouble(object.ptr());  // shown in the message; no key takes it as an integer
  if (PyErr_Occurred()) {
    PyErr_Clear();
    return overflow > 0 ? std::numeric_limits<double>::infinity() : -std::numeric_limits<double>::infinity();
  }
  return wide;
}

// A table of the program's own, such as {torch.nn.Linear: policy}.
bool has_other_keys(py::handle dict) {
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t at = 0;
  while (PyDict_Next(dict.ptr(), &at, &key, &value)) {
    if (!PyUnicode_Check(key)) return true;
  }
  return false;
}

config::Value from_dict(py::handle object, std::vector<py::object>& objects, int depth) {
  config::Value out = config::Value::object();
  auto& members = out.get_ref<config::Value::object_t&>();
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t at = 0;
  while (PyDict_Next(object.ptr(), &at, &key, &value)) {
    if (!PyUnicode_Check(key)) fail(ErrorKind::kConfig, "config: the key ", repr_of(key), " is not a text.");
    members.push_back({utf8(key), convert(value, objects, depth + 1)});  // a dict has no duplicates to look for
  }
  return out;
}

config::Value convert(py::handle object, std::vector<py::object>& objects, int depth) {
  PyObject* p = object.ptr();
  if (depth > config::kMaxDepth) {
    fail(ErrorKind::kConfig, "config: nested deeper than ", config::kMaxDepth, " levels, or it contains itself.");
  }
  if (p == Py_None) return nullptr;
  if (PyBool_Check(p)) return p == Py_True;
  if (PyLong_Check(p)) return from_int(object);
  if (PyFloat_Check(p)) return PyFloat_AS_DOUBLE(p);
  if (PyUnicode_Check(p)) return utf8(object);
  if (PyDict_Check(p) && !(depth > 0 && has_other_keys(object))) return from_dict(object, objects, depth);
  if (PyList_Check(p) || PyTuple_Check(p)) {
    config::Value out = config::Value::array();
    const auto items = py::reinterpret_borrow<py::sequence>(object);
    for (size_t i = 0; i < items.size(); ++i) out.push_back(convert(py::object(items[i]), objects, depth + 1));
    return out;
  }
  if (py::hasattr(object, "__fspath__")) return utf8(py::str(object.attr("__fspath__")()));
  // Integers and floats of NumPy, but no tensors: those may be a learning rate and must stay what they are.
  if (!py::hasattr(object, "requires_grad") && !PyType_Check(p)) {
    if (PyIndex_Check(p)) {
      if (PyObject* index = PyNumber_Index(p)) return from_int(py::reinterpret_steal<py::object>(index));
      PyErr_Clear();
    } else if (py::hasattr(object, "__float__")) {
      const double v = PyFloat_AsDouble(p);
      if (!PyErr_Occurred()) return v;
      PyErr_Clear();
    }
  }
  objects.push_back(py::reinterpret_borrow<py::object>(object));
  return config::python_value(repr_of(object), objects.size() - 1);
}

}  // namespace

config::Value from_python(py::handle object, std::vector<py::object>& objects) { return convert(object, objects, 0); }

py::object to_python(const config::Value& value, const std::vector<py::object>& objects) {
  switch (value.type()) {
    case config::Value::value_t::object: {
      py::dict out;
      for (const auto& item : value.items()) out[py::str(item.key())] = to_python(item.value(), objects);
      return out;
    }
    case config::Value::value_t::array: {
      py::list out;
      for (const auto& item : value) out.append(to_python(item, objects));
      return out;
    }
    case config::Value::value_t::string: return py::str(value.get_ref<const std::string&>());
    case config::Value::value_t::boolean: return py::bool_(value.get<bool>());
    case config::Value::value_t::number_integer: return py::int_(value.get<int64_t>());
    case config::Value::value_t::number_unsigned: return py::int_(value.get<uint64_t>());
    case config::Value::value_t::number_float: return py::float_(value.get<double>());
    case config::Value::value_t::binary: {
      const uint64_t index = config::python_index(value);
      if (index < objects.size()) return objects[index];
      break;
    }
    default: break;
  }
  return py::none();
}

}  // namespace ds::bindings
