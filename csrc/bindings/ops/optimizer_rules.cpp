// The native optimizers as Python sees them: names, slots, hyperparameters.
#include "bindings/ops/optimizer_rules.h"

#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/registry.h"

namespace py = pybind11;

namespace ds::bindings {

std::vector<double> hyper_values(const optim::Rule& rule, const std::map<std::string, double>& given) {
  std::vector<double> values;
  size_t known = 0;
  for (const optim::Hyperparameter& one : rule.hyper) {
    const auto found = given.find(one.name);
    known += found != given.end();
    values.push_back(found != given.end() ? found->second : one.fallback);
  }
  if (known == given.size()) return values;
  std::string names;
  for (const optim::Hyperparameter& one : rule.hyper) names += (names.empty() ? "" : ", ") + one.name;
  for (const auto& [name, value] : given) {
    bool own = false;
    for (const optim::Hyperparameter& one : rule.hyper) own = own || one.name == name;
    if (!own) fail(ErrorKind::kValue, "the optimizer '", rule.name, "' has no '", name, "'; it has: ", names);
  }
  return values;
}

}  // namespace ds::bindings

DS_BINDINGS(m) {
  m.def(
      "optimizer_rules",
      [] {
        py::dict result;
        for (const ds::optim::Rule& rule : ds::optim::rules()) {
          py::dict hyper, one;
          for (const ds::optim::Hyperparameter& parameter : rule.hyper)
            hyper[py::str(parameter.name)] = parameter.fallback;
          one["slots"] = rule.slots;
          one["hyper"] = hyper;
          result[py::str(rule.name)] = one;
        }
        return result;
      },
      "{name: {'slots': [names of its states], 'hyper': {name: default}}} of the native optimizers");
}
