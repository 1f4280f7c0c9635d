// The names by which pickles find classes and functions, as Python's own pickler writes them in protocol 2.
#pragma once
#include <pybind11/pybind11.h>

#include <string>

namespace ds::bindings {

struct GlobalName {
  std::string module, name;  // for Python 2, as the protocol asks
  // Set for an object that is defined in a class: it is `attribute` of `parent`, which is pickled in its turn.
  pybind11::object parent;
  std::string attribute;
};

// `name`: what the object says of itself, or None. pickle.PicklingError for what is not found again by its name.
GlobalName global_name(const pybind11::object& object, const pybind11::object& name);

[[noreturn]] void raise_pickling_error(const std::string& text);

}  // namespace ds::bindings
