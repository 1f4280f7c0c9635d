#include "bindings/formats/pickled_globals.h"

namespace py = pybind11;

namespace ds::bindings {
namespace {

std::string ascii(const std::string& text, const std::string& module) {
  for (const char c : text) {
    if (static_cast<unsigned char>(c) >= 0x80) {
      raise_pickling_error("can't pickle global identifier '" + module + "." + text + "' using pickle protocol 2");
    }
  }
  return text;
}

}  // namespace

void raise_pickling_error(const std::string& text) {
  PyErr_SetString(py::module_::import("pickle").attr("PicklingError").ptr(), text.c_str());
  throw py::error_already_set();
}

GlobalName global_name(const py::object& object, const py::object& given) {
  py::object full = given;
  if (full.is_none()) full = py::getattr(object, "__qualname__", py::none());
  if (full.is_none()) full = object.attr("__name__");
  const std::string said = py::repr(object), name = full.cast<std::string>();
  const auto module = py::module_::import("pickle").attr("whichmodule")(object, full).cast<std::string>();
  py::object parent, found;
  std::string attribute;
  try {
    found = py::module_::import(module.c_str());
    for (const py::handle part : full.attr("split")(".")) {
      attribute = part.cast<std::string>();
      if (attribute == "<locals>") raise_pickling_error("Can't pickle local object " + said);
      parent = found;
      found = found.attr(attribute.c_str());
    }
  } catch (py::error_already_set& error) {
    if (error.matches(PyExc_ImportError)) {
      raise_pickling_error("Can't pickle " + said + ": import of module '" + module + "' failed");
    }
    if (!error.matches(PyExc_AttributeError)) throw;
    raise_pickling_error("Can't pickle " + said + ": attribute lookup " + name + " on " + module + " failed");
  }
  if (!found.is(object)) {
    raise_pickling_error("Can't pickle " + said + ": it's not the same object as " + module + "." + name);
  }
  if (name != attribute) return {module, name, parent, attribute};
  const py::module_ names = py::module_::import("_compat_pickle");
  const py::dict of_names = names.attr("REVERSE_NAME_MAPPING"), of_modules = names.attr("REVERSE_IMPORT_MAPPING");
  const py::tuple both = py::make_tuple(module, name);
  GlobalName made{module, name, py::object(), ""};
  if (of_names.contains(both)) {
    const py::tuple older = of_names[both];
    made.module = older[0].cast<std::string>();
    made.name = older[1].cast<std::string>();
  } else if (of_modules.contains(module.c_str())) {
    made.module = of_modules[module.c_str()].cast<std::string>();
  }
  return {ascii(made.module, made.module), ascii(made.name, made.module), py::object(), ""};
}

}  // namespace ds::bindings
