#include "bindings/engine/nested_tensors.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <unordered_set>

#include "bindings/registry.h"

namespace py = pybind11;

namespace ds::bindings {

namespace {

// visit(value) for each value of a tuple, list or dict; false for anything else. What they hold may change meanwhile:
// properties that are read run Python.
template <typename Visit>
bool visit_values(PyObject* item, const Visit& visit) {
  if (PyDict_Check(item)) {
    const auto values = py::reinterpret_steal<py::object>(PyDict_Values(item));
    for (const py::handle value : values) visit(value.ptr());
  } else if (PyTuple_Check(item) || PyList_Check(item)) {
    const auto values = py::reinterpret_steal<py::object>(PySequence_Tuple(item));
    for (const py::handle value : values) visit(value.ptr());
  } else {
    return false;
  }
  return true;
}

void collect_nested(PyObject* item, std::vector<at::Tensor>& found) {
  if (THPVariable_Check(item)) {
    found.push_back(THPVariable_Unpack(item));
    return;
  }
  if (visit_values(item, [&](PyObject* value) { collect_nested(value, found); })) return;
  if (PyType_Check(item) || !PyObject_HasAttrString(item, "__dataclass_fields__")) return;
  const auto object = py::reinterpret_borrow<py::object>(item);
  for (const py::handle field : py::module_::import("dataclasses").attr("fields")(object))
    collect_nested(py::getattr(object, field.attr("name"), py::none()).ptr(), found);
}

class Within {
 public:
  std::vector<at::Tensor> found;

  void walk(PyObject* item) {
    if (item == Py_None || is_closed(item) || !seen_.insert(item).second) return;
    held_.push_back(py::reinterpret_borrow<py::object>(item));  // its address stays its own
    if (THPVariable_Check(item)) {
      found.push_back(THPVariable_Unpack(item));
      return;
    }
    const auto visit = [this](PyObject* value) { walk(value); };
    if (!visit_values(item, visit) && PyAnySet_Check(item)) {
      const auto values = py::reinterpret_steal<py::object>(PySequence_Tuple(item));
      for (const py::handle value : values) walk(value.ptr());
    }
    const auto object = py::reinterpret_borrow<py::object>(item);
    if (const py::object own = py::getattr(object, "__dict__", py::none()); PyDict_Check(own.ptr()))
      visit_values(own.ptr(), visit);
    for (const py::handle kind : py::type::handle_of(object).attr("__mro__")) walk_slots(object, kind);
  }

 private:
  bool is_closed(PyObject* item) const {
    if (PyUnicode_Check(item) || PyBytes_Check(item) || PyLong_Check(item) || PyFloat_Check(item)) return true;
    if (PyComplex_Check(item) || PyType_Check(item) || PyModule_Check(item)) return true;
    return PyFunction_Check(item) || PyMethod_Check(item) || py::isinstance(item, module_);
  }

  void walk_slots(const py::object& object, const py::handle kind) {
    const py::object slots = py::getattr(kind.attr("__dict__"), "get")("__slots__", py::tuple());
    const auto names = py::isinstance<py::str>(slots) ? py::make_tuple(slots) : py::tuple(slots);
    for (const py::handle name : names) {
      const auto text = name.cast<std::string>();
      if (text == "__dict__" || text == "__weakref__") continue;
      walk(py::getattr(object, name, py::none()).ptr());
    }
  }

  const py::object module_ = py::module_::import("torch.nn").attr("Module");
  std::unordered_set<PyObject*> seen_;
  std::vector<py::object> held_;
};

}  // namespace

std::vector<at::Tensor> tensors_in(PyObject* item) {
  std::vector<at::Tensor> found;
  collect_nested(item, found);
  return found;
}

std::vector<at::Tensor> tensors_within(PyObject* item) {
  Within within;
  within.walk(item);
  return std::move(within.found);
}

DS_BINDINGS(m) {
  m.def(
      "tensors_in", [](const py::object& item) { return tensors_in(item.ptr()); }, "item"_a,
      "All tensors in nested lists, tuples, dicts (the outputs of Hugging Face models) and dataclasses, in order.");
  m.def(
      "tensors_within", [](const py::object& item) { return tensors_within(item.ptr()); }, "item"_a,
      "`tensors_in`, and also in the attributes of objects of any class, wherever they refer to each other. Each "
      "tensor once.");
}

}  // namespace ds::bindings
