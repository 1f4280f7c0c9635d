#include "config/resolver.h"

#include <algorithm>

#include "base/ranges.h"
#include "config/check.h"
#include "config/rules.h"
#include "config/nearest.h"
#include "config/secrets.h"
#include "config/text.h"

namespace ds::config {

namespace {

// A key of the user's own that is a comment: "_comment", "# why", "//".
bool is_comment(const std::string& key) {
  return !key.empty() && (key[0] == '_' || key[0] == '#' || key.compare(0, 2, "//") == 0);
}

bool is_auto(const Value& value) { return value.is_string() && value.get_ref<const std::string&>() == "auto"; }

std::vector<std::string> names_of(const std::vector<Field>& fields) {
  std::vector<std::string> out;
  for (const Field& f : fields) {
    if (f.is_wildcard()) continue;
    out.push_back(f.name);
    append(out, f.aliases);
  }
  return out;
}

std::string describe_required(Field field) {
  field.kinds &= ~kNull;
  return describe_kinds(field);
}

// Dotted paths of the sections in which a key of this name is known.
void homes_of(const std::string& key, const std::vector<Field>& fields, const std::string& path,
              std::vector<std::string>& out) {
  for (const Field& f : fields) {
    if (f.name == key && !path.empty()) out.push_back(join_path(path, key));
    if (!f.is_wildcard()) homes_of(key, f.fields, join_path(path, f.name), out);
  }
}

}  // namespace

class Resolver {
 public:
  Resolver(Config& config, const Schema& schema, const Options& options)
      : config_(config), schema_(schema), options_(options) {}

  void run() {
    config_.issues_ = config_.document_.issues;
    config_.values_ = section_defaults(schema_.root);
    section(schema_.root, config_.document_.root, "", config_.values_);
    apply_forwards();
    if (!options_.sections_only) apply_environment();
    run_rules(config_, schema_, options_);
  }

 private:
  struct Forward {
    std::string from, to;
    Value value;
  };

  void error(const std::string& code, const std::string& path, const std::string& what, const std::string& suggestion,
             ErrorKind kind = ErrorKind::kConfig) {
    config_.issues_.push_back({Severity::kError, kind, code, {path}, what, suggestion});
  }

  std::string assigned(const std::string& path, const Value& value) {
    const Origin origin = config_.origin(path);
    const std::string where = origin.source == Source::kEnvironment ? "environment variable " + origin.detail
                              : config_.line(path)                  ? "line " + std::to_string(config_.line(path))
                                                                    : "";
    const std::string name = path.substr(path.rfind('.') + 1);
    const Value shown = masked(value, field_at(path), name);
    return path + " = " + show(shown) + (where.empty() ? "" : " (" + where + ")");
  }

  void section(const Field& at, const Value& given, const std::string& path, Value& out) {
    std::vector<std::pair<const Field*, std::string>> seen;  // few: a section has no more Fields than that
    for (const auto& item : given.items()) {
      const std::string here = join_path(path, item.key());
      const Field* field = at.find(item.key());
      if (!field) {
        unknown(at, item.key(), item.value(), path, out);
        continue;
      }
      const std::string kept = field->is_wildcard() ? here : join_path(path, field->name);
      if (field->aliases_yield && item.key() != field->name && given.contains(field->name)) {
        warn("two_spellings", here, config_.where(here) + " is ignored, because " + config_.where(kept) + " is given.");
        continue;
      }
      if (!field->is_wildcard()) {
        const auto first = find_if(seen, [field](const auto& entry) { return entry.first == field; });
        if (first == seen.end()) {
          seen.emplace_back(field, item.key());
        } else {
          error("two_spellings", here,
                config_.where(here) + " and " + config_.where(join_path(path, first->second)) +
                    " are two names of one key.",
                "Keep \"" + field->name + "\".");
          continue;
        }
      }
      if (here != kept) {
        const auto line = config_.document_.lines.find(here);
        if (line != config_.document_.lines.end()) config_.document_.lines.emplace(kept, line->second);
      }
      deprecated(*field, item.value(), here, path);
      Value& slot = out[field->is_wildcard() ? item.key() : field->name];
      one(*field, item.value(), here, kept, at.validated, slot);
    }
    for (const Field& f : at.fields) {
      if (f.is_required && !given.contains(f.name)) {
        error("missing_key", join_path(path, f.name),
              join_path(path, f.name) + " is missing; it must be " + describe_required(f) + ".",
              "Add it to \"" + path + "\".");
      }
      if (!f.variant_key.empty()) variant(f, path, out);
    }
  }

  // One known key. `here` is as the user spelled it, `kept` the name it is kept under.
  void one(const Field& field, const Value& value, const std::string& here, const std::string& kept, bool validated,
           Value& slot) {
    if (validated && is_auto(value)) {
      config_.origins_[kept] = {Source::kAuto, config_.line(here), ""};
      if (slot.is_null() && !field.null_when_absent) slot = default_of(field);
      config_.issues_.push_back({Severity::kNote,
                                 ErrorKind::kConfig,
                                 "auto",
                                 {here},
                                 assigned(here, value) + " is left to the default " + show(slot, 60) + ".",
                                 ""});
      return;
    }
    if (field.is_section()) return sub_section(field, value, here, kept, slot);
    if (!field.fields.empty() && value.is_array()) return list_of_sections(field, value, here, kept, slot);
    const auto names = options_.other_names.find(here);
    CheckResult verdict =
        check(field, value, validated, names == options_.other_names.end() ? nullptr : &names->second);
    if (!verdict.value && is_auto(value)) {
      if (slot.is_null() || is_auto(slot)) slot = default_of(field);
      config_.origins_[kept] = {Source::kAuto, config_.line(here), ""};
      return error(kLeftToTrainer, here, assigned(here, value) + " " + verdict.problem + ".", verdict.suggestion);
    }
    if (!verdict.value) {
      if (slot.is_null()) slot = default_of(field);
      error(verdict.out_of_range ? "bad_value" : "wrong_type", here,
            (verdict.out_of_range ? field.violation_words : "") + assigned(here, value) + " " + verdict.problem + ".",
            verdict.suggestion, verdict.out_of_range ? field.violation : ErrorKind::kConfig);
      return;
    }
    if (!verdict.warning.empty()) warn("read_as", here, assigned(here, value) + " " + verdict.warning);
    slot = std::move(*verdict.value);
    if (!value.is_null() || field.kinds & kNull) config_.origins_[kept] = {Source::kGiven, config_.line(here), ""};
    if (!field.no_effect_because.empty() && !value.is_null() && slot != default_of(field)) without_effect(here, value, field.no_effect_because);
    if (field.unbuilt && !field.unbuilt->inert && !is_overridden(field)) refuse_value(field, slot, here);
  }

  bool is_overridden(const Field& field) const {
    if (field.environment.empty() || options_.sections_only) return false;
    const auto set = options_.environment.find(field.environment);
    return set != options_.environment.end() && !set->second.empty();
  }

  void sub_section(const Field& field, const Value& value, const std::string& here, const std::string& kept,
                   Value& slot) {
    if (value.is_null()) return;  // the same as leaving it out
    if (value.is_object()) {
      if (slot.is_null()) slot = section_defaults(field);
      config_.origins_[kept] = {Source::kGiven, config_.line(here), ""};
      section(field, value, kept, slot);
    } else if (value.is_boolean() && field.present_by_bool) {
      if (!value.get<bool>()) return;
      if (slot.is_null()) slot = section_defaults(field);
      config_.origins_[kept] = {Source::kGiven, config_.line(here), ""};
    } else if (value.is_boolean() && !field.bool_key.empty()) {
      if (slot.is_null()) slot = section_defaults(field);
      const Literal& set = value.get<bool>() ? field.bool_true : field.bool_false;
      if (!field.bool_doc.empty()) warn("bare_bool", here, assigned(here, value) + " " + field.bool_doc);
      config_.origins_[kept] = {Source::kGiven, config_.line(here), ""};
      const Field* key = find_field(field.fields, field.bool_key);
      one(*key, to_value(set), join_path(here, field.bool_key), join_path(kept, field.bool_key), false,
          slot[field.bool_key]);
      config_.origins_[join_path(kept, field.bool_key)] = {Source::kDerived, config_.line(here),
                                                           "a bare boolean for " + here};
    } else {
      error(
          "wrong_type", here, assigned(here, value) + " must be " + describe_kinds(field) + ".",
          value.is_boolean() && find_field(field.fields, "enabled") ? "Write {\"enabled\": " + show(value) + "}." : "");
      return;
    }
    if (field.unbuilt && !field.unbuilt->inert) refuse_section(field, here, slot);
  }

  void list_of_sections(const Field& field, const Value& value, const std::string& here, const std::string& kept,
                        Value& slot) {
    slot = Value::array();
    config_.origins_[kept] = {Source::kGiven, config_.line(here), ""};
    for (size_t i = 0; i < value.size(); ++i) {
      const std::string at = here + "[" + std::to_string(i) + "]";
      if (!value[i].is_object()) {
        error("wrong_type", at, assigned(at, value[i]) + " must be an object.", "");
        continue;
      }
      Value item = section_defaults(field);
      section(field, value[i], at, item);
      slot.push_back(std::move(item));
    }
  }

  // params of an optimizer or scheduler whose keys depend on its type: checked, but no default is filled in, because
  // the class has its own.
  void variant(const Field& field, const std::string& path, Value& out) {
    const Value& chosen = out[field.variant_key];
    Value& params = out[field.name];
    if (!chosen.is_string() || !params.is_object()) {
      if (chosen.is_string() && params.is_null()) missing_params(field, path, chosen, Value::object());
      return;
    }
    const auto set = field.variants.find(chosen.get<std::string>());
    if (set == field.variants.end()) return;
    for (auto& item : params.items()) {
      const std::string here = join_path(join_path(path, field.name), item.key());
      const Field* known = find_field(set->second, item.key());
      if (!known) {
        const std::string near = nearest(item.key(), names_of(set->second));
        error("unknown_key", here, config_.where(here) + " is not a parameter of " + set->first + ".",
              near.empty() ? "It has " + listed(names_of(set->second)) + "." : "Did you mean \"" + near + "\"?");
        continue;
      }
      const Value given = item.value();
      one(*known, given, here, here, false, item.value());
    }
    missing_params(field, path, chosen, params);
  }

  void missing_params(const Field& field, const std::string& path, const Value& chosen, const Value& params) {
    const auto set = field.variants.find(chosen.get<std::string>());
    if (set == field.variants.end()) return;
    for (const Field& f : set->second) {
      const std::string here = join_path(join_path(path, field.name), f.name);
      if (f.is_required && !params.contains(f.name)) {
        error("missing_key", here, here + " is missing; " + set->first + " needs it, " + describe_required(f) + ".",
              "Add it to \"" + join_path(path, field.name) + "\".");
      }
    }
  }

  static std::string listed(const std::vector<std::string>& words) {
    std::string out;
    for (const std::string& word : words) out += (out.empty() ? "" : ", ") + word;
    return out;
  }

  void unknown(const Field& at, const std::string& key, const Value& value, const std::string& path, Value& out) {
    const std::string here = join_path(path, key);
    const bool top = path.empty() && schema_.lenient_top;
    if (at.unknown != Unknown::kKeep) {
      if (is_comment(key)) return top ? void() : warn("ignored_key", here, config_.where(here) + " is a comment.");
      const auto old = at.old_keys.find(key);
      if (old != at.old_keys.end())
        return warn("ignored_key", here, config_.where(here) + " is ignored: " + old->second + ".");
    }
    const std::string near = nearest(key, names_of(at.fields));
    const bool slip = !near.empty() && is_slip(key, near) && !(top && contains(schema_.own_words, key));
    std::string suggestion = near.empty() ? "" : "Did you mean \"" + near + "\"?";
    if (!slip) {
      std::vector<std::string> homes;
      homes_of(key, schema_.root.fields, "", homes);
      if (homes.size() == 1) suggestion = "Did you mean \"" + homes.front() + "\"?";
    }
    if (!top && at.unknown == Unknown::kKeep) {
      out[key] = value;
      config_.origins_[here] = {Source::kGiven, config_.line(here), ""};
      if (!at.unknown_because.empty()) without_effect(here, value, at.unknown_because);
      return;
    }
    if (!top && (at.unknown == Unknown::kIgnore || (at.unknown == Unknown::kPrivate && !slip))) {
      const std::string home = home_in_params(at, key);
      return warn("ignored_key", here,
                  config_.where(here) + " is not a key of this section and is ignored" +
                      (home.empty() ? "." : ": it belongs into \"" + join_path(path, home) + "\"."));
    }
    if (!top) {
      if (suggestion.empty()) suggestion = "It has " + listed(names_of(at.fields)) + ".";
      return error("unknown_key", here,
                   config_.where(here) + (path.empty() ? " is not a known key." : " is not a key of \"" + path + "\"."),
                   suggestion);
    }
    for (const std::string& known : schema_.private_keys) {
      if (known == key) return;
    }
    if (slip || options_.strict_top_level) {
      return error("unknown_key", here, config_.where(here) + " is not a known key.", suggestion);
    }
    warn("unknown_key", here,
         config_.where(here) + " is not a known key; it is ignored." + (suggestion.empty() ? "" : " " + suggestion));
  }

  // The name of the section's table of parameters ("params") in which some type has this key; "" for none.
  static std::string home_in_params(const Field& at, const std::string& key) {
    for (const Field& field : at.fields)
      for (const auto& [type, known] : field.variants)
        if (find_field(known, key)) return field.name;
    return "";
  }

  void warn(const std::string& code, const std::string& path, const std::string& text) {
    config_.issues_.push_back({Severity::kWarning, ErrorKind::kConfig, code, {path}, text, ""});
  }

  void without_effect(const std::string& here, const Value& value, const std::string& because) {
    config_.issues_.push_back({Severity::kNote,
                               ErrorKind::kConfig,
                               "no_effect",
                               {here},
                               assigned(here, value) + " is accepted and has no effect here, because " + because + ".",
                               ""});
  }

  void deprecated(const Field& field, const Value& value, const std::string& here, const std::string& path) {
    if (!field.is_deprecated || is_auto(value) || value.is_null()) return;
    warn("deprecated", here,
         config_.where(here) + " is deprecated" +
             (field.replaced_by.empty()
                  ? "."
                  : "; use \"" + field.replaced_by + "\"" + (field.forwarded ? ", which gets its value." : ".")));
    if (!field.forwarded || !check(field, value, true, nullptr).value) return;
    Value carried = value;
    if (!field.forward_true_as.empty()) {
      if (!value.is_boolean() || !value.get<bool>()) return;
      carried = Value::object({{field.forward_true_as, field.forward_true_value}});
    }
    forwards_.push_back({here, join_path(path, field.replaced_by), std::move(carried)});
  }

  void apply_forwards() {
    for (const Forward& forward : forwards_) {
      const Origin now = config_.origin(forward.to);
      const Value* target = config_.find(forward.to);
      if (now.source == Source::kGiven) {
        if (target && *target == forward.value) continue;
        error("two_spellings", forward.from,
              config_.where(forward.from) + " is the deprecated name of " + config_.where(forward.to) +
                  ", and both are given.",
              "Keep \"" + forward.to + "\".", ErrorKind::kAssertion);
        continue;
      }
      const Field* field = field_at(forward.to);
      if (!field || !target) continue;
      one(*field, forward.value, forward.to, forward.to, false, *const_cast<Value*>(target));
      config_.origins_[forward.to] = {Source::kDeprecated, config_.line(forward.from), forward.from};
    }
  }

  // A variable that is empty counts as not set. What a key holds in the file is checked, too: the file is wrong with or
  // without the variable.
  void apply_environment() {
    for (const auto& [path, variable] : schema_.environment) {
      const Field* field = field_at(path);
      if (!is_overridden(*field) || !config_.find(path)) continue;  // its section is absent
      const Value given = scalar_in(options_.environment.at(variable));
      CheckResult verdict = check(*field, given, true, nullptr);
      if (!verdict.value) {
        std::string what = "The environment variable " + variable + " = " + show(given);
        what += " stands for " + path + ", which " + verdict.problem + ".";
        error("environment", path, what, verdict.suggestion.empty() ? "Unset it, or correct it." : verdict.suggestion);
        continue;
      }
      config_.set(path, *verdict.value, {Source::kEnvironment, 0, variable});
      if (field->unbuilt && !field->unbuilt->inert) refuse_value(*field, *verdict.value, path);
    }
  }

  const Field* field_at(const std::string& path) const {
    const Field* at = &schema_.root;
    for (size_t start = 0; at && start <= path.size();) {
      const size_t end = std::min(path.find('.', start), path.size());
      at = at->find(path.substr(start, end - start));
      start = end + 1;
    }
    return at;
  }

  void not_built(const std::string& path, const Value& value, const std::string& feature, const Literal& off) {
    error("not_built", path, assigned(path, value) + ": " + feature + " is not supported yet.",
          off.is_null() ? "Leave this key out." : "Leave this key out, or set it to " + show(off) + ".");
  }

  void refuse_value(const Field& field, const Value& value, const std::string& here) {
    if (!field.unbuilt->values.empty()) {
      for (const Literal& needs : field.unbuilt->values) {
        if (same(value, needs)) return not_built(here, value, field.unbuilt->feature, field.fallback);
      }
    } else if (!same(value, field.fallback)) {
      not_built(here, value, field.unbuilt->feature, field.fallback);
    }
  }

  void refuse_section(const Field& field, const std::string& here, const Value& now) {
    if (field.unbuilt->switches == kWhenPresent) {
      return error("not_built", here, config_.where(here) + ": " + field.unbuilt->feature + " is not supported yet.",
                   "Leave this section out.");
    }
    for (const std::string& key : field.unbuilt->switches) {
      const Field* which = find_field(field.fields, key);
      if (!which) continue;
      const Value& value = now[key];
      const bool off = any_of(which->also_off, [&value](const Literal& one) { return same(value, one); });
      if (!off && !same(value, which->fallback))
        not_built(join_path(here, key), value, field.unbuilt->feature, which->fallback);
    }
  }

  Config& config_;
  const Schema& schema_;
  const Options& options_;
  std::vector<Forward> forwards_;
};

Config resolve(Document document, const Schema& schema, const Options& options) {
  Config config;
  config.document_ = std::move(document);
  Resolver(config, schema, options).run();
  return config;
}

}  // namespace ds::config
