// A resolved configuration as Python holds it.
#pragma once
#include <pybind11/pybind11.h>

#include <vector>

#include "config/resolver.h"

namespace ds::bindings {

struct PyConfig {
  config::Config config;
  std::vector<pybind11::object> objects;  // values that only Python can hold, see config_value.h
  config::Root root;
};

}  // namespace ds::bindings
