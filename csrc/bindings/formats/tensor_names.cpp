#include "bindings/formats/tensor_names.h"

#include <torch/csrc/autograd/python_variable.h>

#include <utility>
#include <vector>

namespace py = pybind11;

namespace ds::bindings {

std::unordered_map<PyObject*, std::string> tensor_names(const py::object& value, const py::object& pieces_class) {
  std::unordered_map<PyObject*, std::string> names, seen;
  std::vector<std::pair<py::object, std::string>> waiting{{value, ""}};
  while (!waiting.empty()) {
    const auto [item, name] = waiting.back();
    waiting.pop_back();
    std::vector<std::pair<py::object, std::string>> children;
    if (THPVariable_Check(item.ptr()) || Py_TYPE(item.ptr()) == reinterpret_cast<PyTypeObject*>(pieces_class.ptr())) {
      names.emplace(item.ptr(), name);
    } else if (PyDict_Check(item.ptr())) {
      if (!seen.emplace(item.ptr(), "").second) continue;
      for (const auto& [key, child] : py::reinterpret_borrow<py::dict>(item)) {
        const std::string text = py::str(key);
        children.emplace_back(py::reinterpret_borrow<py::object>(child), name.empty() ? text : name + "." + text);
      }
    } else if (PyList_Check(item.ptr()) || PyTuple_Check(item.ptr())) {
      if (!seen.emplace(item.ptr(), "").second) continue;
      size_t index = 0;
      for (const py::handle child : item) {
        children.emplace_back(py::reinterpret_borrow<py::object>(child), name + "[" + std::to_string(index++) + "]");
      }
    }
    waiting.insert(waiting.end(), std::make_move_iterator(children.rbegin()), std::make_move_iterator(children.rend()));
  }
  return names;
}

}  // namespace ds::bindings
