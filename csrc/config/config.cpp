// Defaults of sections, and values of a resolved configuration by their paths.
#include "config/resolver.h"

namespace ds::config {

Value default_of(const Field& field) {
  if (!field.is_section()) return to_value(field.fallback);
  if (field.null_when_absent) return nullptr;
  return section_defaults(field);
}

Value section_defaults(const Field& section) {
  Value::object_t out;
  out.reserve(section.fields.size());
  for (const Field& f : section.fields) {
    if (!f.is_wildcard()) out.emplace_back(f.name, default_of(f));
  }
  return Value(std::move(out));
}

Value value_of(const Config& config, const Schema& schema, const std::string& path) {
  if (const Value* value = config.find(path)) return *value;
  const Field* field = &schema.root;
  for (size_t start = 0; field != nullptr && start <= path.size();) {
    const size_t end = std::min(path.find('.', start), path.size());
    field = find_field(field->fields, path.substr(start, end - start));
    start = end + 1;
  }
  if (field == nullptr) fail(ErrorKind::kKey, "the configuration has no key ", path);
  return default_of(*field);
}

const char* source_name(Source source) {
  switch (source) {
    case Source::kDefault: return "default";
    case Source::kGiven: return "given";
    case Source::kDerived: return "derived";
    case Source::kDeprecated: return "deprecated name";
    case Source::kEnvironment: return "environment";
    case Source::kAuto: return "auto";
  }
  return "";
}

Origin Config::origin(const std::string& path) const {
  const auto found = origins_.find(path);
  return found == origins_.end() ? Origin{} : found->second;
}

int Config::line(const std::string& path) const {
  const auto found = document_.lines.find(path);
  return found == document_.lines.end() ? 0 : found->second;
}

const Value* Config::find(const std::string& path) const {
  const Value* at = &values_;
  size_t start = 0;
  while (start <= path.size()) {
    const size_t end = std::min(path.find('.', start), path.size());
    if (!at->is_object()) return nullptr;
    const auto next = at->find(path.substr(start, end - start));
    if (next == at->end()) return nullptr;
    at = &*next;
    start = end + 1;
  }
  return at;
}

void Config::set(const std::string& path, Value value, Origin origin) {
  const Value* found = find(path);
  if (!found) fail(ErrorKind::kKey, "there is no configuration key \"", path, "\"");
  *const_cast<Value*>(found) = std::move(value);  // values_ is ours and not const here
  origins_[path] = std::move(origin);
}

void Config::add(Issue issue) { issues_.push_back(std::move(issue)); }

bool Config::broken() const {
  for (const Issue& issue : issues_) {
    if (issue.severity == Severity::kError) return true;
  }
  return false;
}

std::string Config::where(const std::string& path) const {
  const int at = line(path);
  return at ? path + " (line " + std::to_string(at) + ")" : path;
}

std::string Config::complaint(ErrorKind* kind, bool built_only) const {
  std::vector<const Issue*> errors;
  for (const Issue& issue : issues_) {
    if (issue.severity == Severity::kError && (built_only || issue.code != "not_built")) errors.push_back(&issue);
  }
  if (errors.empty()) return "";
  if (kind) {
    *kind = errors.front()->kind;
    for (const Issue* issue : errors) {
      if (issue->kind == ErrorKind::kAssertion) *kind = ErrorKind::kAssertion;
    }
  }
  if (errors.size() == 1) return document_.source + ": " + errors.front()->full();
  std::string out = document_.source + ": " + std::to_string(errors.size()) + " things are wrong.";
  for (size_t i = 0; i < errors.size(); ++i) out += "\n  " + std::to_string(i + 1) + ". " + errors[i]->full();
  return out;
}

}  // namespace ds::config
