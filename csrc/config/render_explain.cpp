// Renders a resolved configuration for `ds_config explain`.
#include <algorithm>

#include "config/rules.h"
#include "config/render.h"
#include "config/secrets.h"
#include "config/text.h"

namespace ds::config {

namespace {

struct Row {
  std::string path, value, origin;
  bool is_default;
};

class Lister {
 public:
  explicit Lister(const Config& config) : config_(config) {}

  void section(const Field& at, const Value& values, const std::string& path, const std::string& outer) {
    for (const auto& item : values.items()) {
      const std::string here = join_path(path, item.key());
      const Field* field = at.find(item.key());
      const std::string pending = field ? pending_feature(*field, outer) : outer;
      const std::string inert = no_effect_of(field ? *field : at, !field);
      if (field && field->is_section() && item.value().is_object()) {
        section(*field, item.value(), here, pending);
      } else if (field && !field->variants.empty() && item.value().is_object()) {
        for (const auto& param : item.value().items()) {  // of an optimizer: every one has a line of its own
          const std::string name = join_path(here, param.key());
          rows.push_back(
              {name, show(masked(param.value(), nullptr, param.key())), origin_of(name, here, pending), false});
        }
      } else {
        rows.push_back({here, show(masked(item.value(), field, item.key())), origin_of(here, here, pending) + inert,
                        is_default(field, here, item.value())});
      }
    }
  }

  std::vector<Row> rows;

 private:
  bool is_default(const Field* field, const std::string& path, const Value& value) const {
    const Source source = config_.origin(path).source;
    if (source == Source::kDefault || source == Source::kAuto) return true;
    return field && !field->is_wildcard() && value == default_of(*field);
  }

  // `within`: the key whose origin counts where `path` has none: parameters of an optimizer that we do not know.
  std::string origin_of(const std::string& path, const std::string& within, const std::string& pending) const {
    Origin origin = config_.origin(path);
    if (origin.source == Source::kDefault && path != within) {
      origin = config_.origin(within);
      origin.line = std::max(origin.line, config_.line(path));
    }
    std::string out;
    switch (origin.source) {
      case Source::kDefault: out = "default"; break;
      case Source::kGiven: out = origin.line ? "line " + std::to_string(origin.line) : "given"; break;
      case Source::kAuto:
        out = origin.line ? "default, \"auto\" on line " + std::to_string(origin.line) : "default, for \"auto\"";
        break;
      case Source::kDerived: out = "derived: " + origin.detail; break;
      case Source::kEnvironment: out = "environment: " + origin.detail; break;
      case Source::kDeprecated:
        out = "deprecated name " + origin.detail + (origin.line ? ", line " + std::to_string(origin.line) : "");
        break;
    }
    return pending.empty() ? out : out + "; known, not built yet: " + pending;
  }

  const Config& config_;
};

void table(const std::vector<Row>& rows, std::string& out) {
  size_t path = 0, value = 0;
  for (const Row& row : rows) {
    path = std::max(path, std::min<size_t>(row.path.size(), 60));
    value = std::max(value, std::min<size_t>(row.value.size(), 28));
  }
  for (const Row& row : rows) {
    std::string line =
        row.path + std::string(path > row.path.size() ? path - row.path.size() : 0, ' ') + "  " + row.value;
    const size_t width = path + 2 + value;
    if (line.size() < width) line.resize(width, ' ');
    out += line + "  " + row.origin + "\n";
  }
}

// Appends those issues under a title, and returns whether there are any. `code`: only issues with this code; "": all but
// those that are left to a trainer.
bool issues(const Config& config, Severity severity, const char* title, std::string& out, const std::string& code = "") {
  std::string lines;
  for (const Issue& issue : config.issues()) {
    const bool wanted = code.empty() ? issue.code != kLeftToTrainer : issue.code == code;
    if (issue.severity == severity && wanted) lines += "  - " + issue.full() + "\n";
  }
  if (!lines.empty()) out += std::string("\n") + title + "\n" + lines;
  return !lines.empty();
}

}  // namespace

std::string pending_feature(const Field& field, const std::string& outer) {
  if (!outer.empty()) return outer;
  if (!field.unbuilt || !field.unbuilt->values.empty()) return "";
  return field.unbuilt->feature;
}

std::string no_effect_of(const Field& field, bool unknown) {
  const std::string& because = unknown ? field.unknown_because : field.no_effect_because;
  return because.empty() ? "" : "; accepted, no effect here, because " + because;
}

std::string explain(const Config& config, const Schema& schema) {
  Lister lister(config);
  lister.section(schema.root, config.values(), "", "");
  std::string out = config.document().source + "\n\n";
  table(lister.rows, out);
  out += consequences(config, schema);
  issues(config, Severity::kNote, "Left to the defaults", out, "auto");
  issues(config, Severity::kNote, "Accepted without effect", out, "no_effect");
  issues(config, Severity::kWarning, "Warnings", out);
  const bool left =
      issues(config, Severity::kError, "Filled in by the trainer (transformers, accelerate); without one, write values",
             out, kLeftToTrainer);
  if (!issues(config, Severity::kError, "Conflicts", out))
    out += left ? "\nNo conflicts, once the trainer has filled it in.\n" : "\nNo conflicts.\n";
  return out;
}

std::string non_default(const Config& config, const Schema& schema) {
  Lister lister(config);
  lister.section(schema.root, config.values(), "", "");
  std::string out;
  for (const Row& row : lister.rows) {
    if (!row.is_default) out += row.path + " = " + row.value + " (" + row.origin + ")\n";
  }
  if (!out.empty()) out.pop_back();
  return out;
}

}  // namespace ds::config
