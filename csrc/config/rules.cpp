#include "config/rules.h"

#include <algorithm>

#include "base/ranges.h"

namespace ds::config {

namespace {

class ConfigRuleContext : public RuleContext {
 public:
  explicit ConfigRuleContext(Config& config) : config_(config) {}

  bool given(const std::string& path) const override {
    const Source source = config_.origin(path).source;
    const Value* value = config_.find(path);
    return value && !value->is_null() && source != Source::kDefault && source != Source::kAuto;
  }
  bool refused(const std::string& path) const override {
    return any_of(config_.issues(), [&](const Issue& one) {
      return one.severity == Severity::kError && std::count(one.paths.begin(), one.paths.end(), path) > 0;
    });
  }
  bool is_null(const std::string& path) const override {
    const Value* value = config_.find(path);
    return !value || value->is_null();
  }
  bool is_bare_bool(const std::string& key) const override {
    const auto found = config_.document().root.find(key);
    return found != config_.document().root.end() && found->is_boolean();
  }
  bool on(const std::string& path) const override {
    const Value* value = config_.find(path);
    return value && value->is_boolean() && value->get<bool>();
  }
  int64_t integer(const std::string& path) const override {
    const Value* value = config_.find(path);
    return value && value->is_number_integer() ? value->get<int64_t>() : 0;
  }
  double number(const std::string& path) const override {
    const Value* value = config_.find(path);
    return value && value->is_number() ? value->get<double>() : 0.0;
  }
  std::string text(const std::string& path) const override {
    const Value* value = config_.find(path);
    return value && value->is_string() ? value->get<std::string>() : "";
  }
  size_t size(const std::string& path) const override {
    const Value* value = config_.find(path);
    return value && value->is_structured() ? value->size() : 0;
  }
  std::vector<std::string> keys(const std::string& path) const override {
    const Value* value = config_.find(path);
    std::vector<std::string> out;
    if (!value || !value->is_object()) return out;
    for (const auto& item : value->items()) out.push_back(item.key());
    return out;
  }
  std::vector<std::string> given_keys(const std::string& path) const override {
    std::vector<std::string> out;
    for (const std::string& key : keys(path)) {
      std::string inside = path;
      inside += "." + key;
      if (given(inside)) out.push_back(key);
    }
    return out;
  }

  void error(const std::vector<std::string>& paths, const std::string& what, const std::string& fix,
             ErrorKind kind) override {
    config_.add({Severity::kError, kind, "rule", paths, causes(paths) + what, fix});
  }
  void warn(const std::vector<std::string>& paths, const std::string& what) override {
    config_.add({Severity::kWarning, ErrorKind::kConfig, "rule", paths, causes(paths) + what, ""});
  }
  void derive(const std::string& path, const Literal& value, const std::string& why) override {
    config_.set(path, to_value(value), {why.empty() ? Source::kDefault : Source::kDerived, 0, why});
  }

 private:
  std::string causes(const std::vector<std::string>& paths) const {
    std::string out;
    for (const std::string& path : paths) {
      const Value* value = config_.find(path);
      const int line = config_.line(path);
      out += (out.empty() ? "" : ", ") + path;
      if (value && !value->is_structured()) out += " = " + show(*value, 60);
      if (line) out += " (line " + std::to_string(line) + ")";
    }
    return out + ": ";
  }

  Config& config_;
};

}  // namespace

void run_rules(Config& config, const Schema& schema, const Options& options) {
  ConfigRuleContext bench(config);
  for (const Rule& rule : schema.rules) {
    if (!(options.sections_only && rule.whole_only)) rule.check(bench);
  }
}

std::string consequences(const Config& config, const Schema& schema) {
  Config copy(config);
  const ConfigRuleContext bench(copy);
  std::string out;
  for (const Consequence& one : schema.consequences) {
    out += "\n" + one.title + "\n";
    for (const std::string& line : one.tell(bench)) out += "  - " + line + "\n";
  }
  return out;
}

}  // namespace ds::config
