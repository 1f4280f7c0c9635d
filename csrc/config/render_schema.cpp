// Renders the schema as JSON schema, for editors.
#include "config/render.h"

namespace ds::config {

namespace {

Value object_of(const Field& section, const std::string& outer);

Value types_of(unsigned kinds) {
  Value out = Value::array();
  if (kinds & kBool) out.push_back("boolean");
  if (kinds & kFloat)
    out.push_back("number");
  else if (kinds & kInt)
    out.push_back("integer");
  if (kinds & kText) out.push_back("string");
  if (kinds & kList) out.push_back("array");
  if (kinds & (kTable | kSection)) out.push_back("object");
  if (kinds & kNull) out.push_back("null");
  return out;
}

void set_bounds(const Field& field, Value& out) {
  if (field.minimum) out[field.above_minimum ? "exclusiveMinimum" : "minimum"] = *field.minimum;
  if (field.maximum) out[field.below_maximum ? "exclusiveMaximum" : "maximum"] = *field.maximum;
}

Value items_of(const Field& field) {
  Value out = {{"type", types_of(field.item_kinds)}};
  if (field.item_minimum) out["minimum"] = *field.item_minimum;
  if (field.item_below) out["exclusiveMaximum"] = *field.item_below;
  for (const Literal& choice : field.item_choices) out["enum"].push_back(to_value(choice));
  return out;
}

// In a validated section every value may be "auto", and editors must not mark it.
Value or_auto(Value described) {
  if (described.contains("type") && described["type"] == Value::array({"string"}) && !described.contains("enum"))
    return described;
  Value plain = Value::object();
  for (const char* key : {"type", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "items",
                          "minItems", "maxItems", "properties", "additionalProperties", "required"}) {
    if (!described.contains(key)) continue;
    plain[key] = described[key];
    described.erase(key);
  }
  if (!plain.empty()) described["anyOf"] = Value::array({plain, {{"const", "auto"}}});
  return described;
}

Value describe(const Field& field, const std::string& outer) {
  Value out = Value::object();
  out["description"] = field.doc;
  const std::string pending = pending_feature(field, outer);
  if (!(field.kinds & kAnything)) {
    Value types = types_of(field.kinds);
    if (field.kinds & kInfinity) types.push_back("number");
    if (!(field.kinds & kPython)) out["type"] = types;
  }
  out["default"] = default_of(field);
  if (!field.fallback_note.empty()) out["x-ds-default"] = field.fallback_note;
  if (!field.choices.empty()) {
    Value& choices = out[field.open_choices.empty() && !field.any_case ? "enum" : "examples"];
    for (const Literal& choice : field.choices) choices.push_back(to_value(choice));
    if (out.contains("enum")) {
      if (field.kinds & kNull) out["enum"].push_back(nullptr);
      if (field.kinds & (kInt | kFloat) && field.kinds & kText) out.erase("enum");
    }
  }
  set_bounds(field, out);
  if (field.kinds & kList && field.item_kinds) out["items"] = items_of(field);
  if (field.item_count) out["minItems"] = out["maxItems"] = *field.item_count;
  if (field.kinds & kList && !field.fields.empty()) {
    out["items"] = object_of(field, pending);
    out["items"]["type"] = "object";
  }
  if (!field.aliases.empty()) out["x-ds-aliases"] = field.aliases;
  if (!field.environment.empty()) out["x-ds-environment"] = field.environment;
  if (field.is_deprecated) out["deprecated"] = true;
  if (field.is_secret) out["writeOnly"] = true;
  if (!field.replaced_by.empty()) {
    out["x-ds-replaced-by"] = field.replaced_by;
    out["x-ds-value-forwarded"] = field.forwarded;
  }
  if (!pending.empty()) out["x-ds-not-built"] = pending;
  if (!field.no_effect_because.empty()) out["x-ds-no-effect"] = "because " + field.no_effect_because;
  if (!field.unknown_because.empty()) out["x-ds-other-keys-no-effect"] = "because " + field.unknown_because;
  if (field.unbuilt && !field.unbuilt->values.empty()) {
    for (const Literal& value : field.unbuilt->values) out["x-ds-not-built-values"].push_back(to_value(value));
  }
  if (field.is_section()) out.update(object_of(field, outer));
  for (const auto& [chosen, fields] : field.variants) {
    Value& set = out["x-ds-by-" + field.variant_key][chosen];
    for (const Field& param : fields) set[param.name] = describe(param, "");
  }
  return out;
}

Value object_of(const Field& section, const std::string& outer) {
  Value out = Value::object();
  Value properties = Value::object();
  bool open = section.unknown != Unknown::kError;
  for (const Field& field : section.fields) {
    Value description = describe(field, pending_feature(section, outer));
    if (section.validated && !field.is_wildcard()) description = or_auto(std::move(description));
    if (field.is_wildcard()) {
      out["additionalProperties"] = description;
      open = true;
      continue;
    }
    properties[field.name] = description;
    for (const std::string& alias : field.aliases) properties[alias] = description;
    if (field.is_required) out["required"].push_back(field.name);
  }
  out["properties"] = properties;
  if (!open) out["additionalProperties"] = false;
  if (section.validated) out["x-ds-validated"] = true;
  return out;
}

}  // namespace

std::string json_schema(const Schema& schema) {
  Value out = {{"$schema", "https://json-schema.org/draft/2020-12/schema"},
               {"title", "DeepSpeed configuration"},
               {"type", "object"}};
  out.update(object_of(schema.root, ""));
  if (schema.lenient_top) out["additionalProperties"] = true;
  return out.dump(1) + "\n";
}

}  // namespace ds::config
