// deepspeed._C.config: the configuration of csrc/config and the batch rules of csrc/plan.
#include "base/error.h"
#include "bindings/config/config_value.h"
#include "bindings/config/py_config.h"
#include "bindings/registry.h"
#include "config/render.h"
#include "config/resolver.h"
#include "config/secrets.h"
#include "plan/batch_plan.h"

#include <pybind11/stl.h>

namespace py = pybind11;

namespace ds::bindings {

namespace {

using config::Config;
using config::Root;

Root root_named(const std::string& name) {
  if (name == "training") return Root::kTraining;
  if (name == "inference") return Root::kInference;
  if (name == "ragged_inference") return Root::kRaggedInference;
  fail(ErrorKind::kValue, "there is no configuration named ", name, ": training, inference and ragged_inference are.");
}

using Variables = std::unordered_map<std::string, std::string>;

config::Options options_of(bool strict, bool sections_only, const py::dict& other_names, Variables environment) {
  config::Options out;
  out.strict_top_level = strict;
  out.sections_only = sections_only;
  out.environment = std::move(environment);
  for (const auto& [path, names] : other_names) {
    auto& list = out.other_names[py::cast<std::string>(path)];
    for (const auto& name : names) list.push_back(py::cast<std::string>(name));
  }
  return out;
}

PyConfig resolve_dict(const py::dict& given, const std::string& source, const std::string& root, bool strict,
                      bool sections_only, const py::dict& other_names, Variables environment) {
  PyConfig out;
  out.root = root_named(root);
  config::Value value = from_python(given, out.objects);
  out.config = config::resolve(config::from_value(std::move(value), source), config::schema(out.root),
                               options_of(strict, sections_only, other_names, std::move(environment)));
  return out;
}

PyConfig resolve_text(const py::bytes& text, const std::string& source, const std::string& root, bool strict,
                      bool sections_only, const py::dict& other_names, Variables environment) {
  PyConfig out;
  out.root = root_named(root);
  out.config = config::resolve(config::read_text(std::string_view(text), source), config::schema(out.root),
                               options_of(strict, sections_only, other_names, std::move(environment)));
  return out;
}

const char* severity_name(config::Severity severity) {
  return severity == config::Severity::kError ? "error" : severity == config::Severity::kWarning ? "warning" : "note";
}

// The built-in exception that users may expect beside DeepSpeedConfigError; "" for none.
const char* kind_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kAssertion: return "assertion";
    case ErrorKind::kNotImplemented: return "not_implemented";
    default: return "";
  }
}

py::list issues(const PyConfig& self) {
  py::list out;
  for (const config::Issue& issue : self.config.issues()) {
    py::dict one;
    one["severity"] = severity_name(issue.severity);
    one["kind"] = kind_name(issue.kind);
    one["code"] = issue.code;
    one["paths"] = py::list();
    for (const std::string& path : issue.paths) one["paths"].cast<py::list>().append(path);
    one["text"] = issue.text;
    one["suggestion"] = issue.suggestion;
    out.append(one);
  }
  return out;
}

py::dict origins(const PyConfig& self) {
  py::dict out;
  for (const auto& [path, origin] : self.config.origins()) {
    out[py::str(path)] = py::make_tuple(config::source_name(origin.source), origin.line, origin.detail);
  }
  return out;
}

py::dict layout_of(const config::Field& section) {
  py::dict out;
  for (const config::Field& field : section.fields) {
    if (field.is_wildcard()) continue;
    py::dict one;
    py::list aliases;
    for (const std::string& alias : field.aliases) aliases.append(alias);
    one["aliases"] = aliases;
    one["fields"] = field.is_section() ? py::object(layout_of(field)) : py::object(py::none());
    one["default"] = to_python(config::default_of(field), {});
    one["secret"] = field.is_secret;
    out[py::str(field.name)] = one;
  }
  return out;
}

PyObject* assertion_type = nullptr;  // owned by the module, which Python never unloads
PyObject* config_type = nullptr;

[[noreturn]] void raise(ErrorKind kind, const std::string& text) {
  PyErr_SetString(kind == ErrorKind::kAssertion ? assertion_type : config_type, text.c_str());
  throw py::error_already_set();
}

py::tuple plan_batch(std::optional<int64_t> train, std::optional<int64_t> micro, std::optional<int64_t> accumulation,
                     int64_t world, const std::string& world_source) {
  try {
    const plan::BatchPlan plan = plan::plan_batch({train, micro, accumulation, world, world_source});
    return py::make_tuple(plan.train, plan.micro, plan.accumulation);
  } catch (const Error& e) {
    raise(e.kind(), e.what());
  }
}

}  // namespace

DS_BINDINGS(m) {
  py::module_ c = m.def_submodule("config", "Configuration: keys, resolution, documentation.");
  config_type = m.attr("DeepSpeedConfigError").ptr();
  const py::tuple bases = py::make_tuple(m.attr("DeepSpeedConfigError"), py::handle(PyExc_AssertionError));
  assertion_type = PyErr_NewExceptionWithDoc(
      "deepspeed.DeepSpeedConfigAssertionError",
      "A configuration breaks a rule between keys for which users expect an AssertionError: batch sizes, fp16 with "
      "bf16, a ZeRO stage above 3.",
      bases.ptr(), nullptr);
  c.attr("DeepSpeedConfigAssertionError") = py::handle(assertion_type);

  py::class_<PyConfig>(c, "Config")
      .def("values", [](const PyConfig& self) { return to_python(self.config.values(), self.objects); })
      .def("raw", [](const PyConfig& self) { return to_python(self.config.document().root, self.objects); })
      .def("issues", &issues)
      .def("origins", &origins)
      .def("line", [](const PyConfig& self, const std::string& path) { return self.config.line(path); })
      .def("derive",
           [](PyConfig& self, const std::string& path, py::handle value, const std::string& why, bool environment) {
             self.config.set(path, from_python(value, self.objects),
                             {environment ? config::Source::kEnvironment : config::Source::kDerived, 0, why});
           })
      .def("add_error",
           [](PyConfig& self, const std::string& code, std::vector<std::string> paths, const std::string& text,
              bool assertion) {
             self.config.add({config::Severity::kError, assertion ? ErrorKind::kAssertion : ErrorKind::kConfig, code,
                              std::move(paths), text, ""});
           })
      .def(
          "complaint", [](const PyConfig& self, bool built_only) { return self.config.complaint(nullptr, built_only); },
          "built_only"_a = true)
      .def("explain", [](const PyConfig& self) { return config::explain(self.config, config::schema(self.root)); })
      .def("non_default",
           [](const PyConfig& self) { return config::non_default(self.config, config::schema(self.root)); });

  c.attr("LEFT_TO_TRAINER") = config::kLeftToTrainer;
  c.def(
      "masked",
      [](const py::dict& given, const std::string& root) {
        std::vector<py::object> objects;
        return to_python(config::masked(from_python(given, objects), &config::schema(root_named(root)).root), objects);
      },
      "given"_a, "root"_a = "training",
      "A copy of a configuration, or of a part of it from the top on, with \"***\" for each secret.");
  c.def("resolve_dict", &resolve_dict, "given"_a, "source"_a = "config", "root"_a = "training", "strict"_a = false,
        "sections_only"_a = false, "other_names"_a = py::dict(), "environment"_a = Variables());
  c.def("resolve_text", &resolve_text, "text"_a, "source"_a, "root"_a = "training", "strict"_a = false,
        "sections_only"_a = false, "other_names"_a = py::dict(), "environment"_a = Variables());
  c.def("layout", [](const std::string& root) { return layout_of(config::schema(root_named(root)).root); });
  c.def("environment_variables", [](const std::string& root) {
    py::dict out;
    for (const auto& [path, variable] : config::schema(root_named(root)).environment) out[py::str(variable)] = path;
    return out;
  });
  c.def("docs", &config::docs);
  c.def("json_schema", [](const std::string& root) { return config::json_schema(config::schema(root_named(root))); });
  c.def("plan_batch", &plan_batch, "train"_a, "micro"_a, "accumulation"_a, "world"_a, "world_source"_a = "");
}

}  // namespace ds::bindings
