// Renders the schema as docs/config.md.
#include "config/render.h"
#include "config/text.h"

namespace ds::config {

namespace {

std::string cell(std::string text) {
  for (size_t at = 0; (at = text.find('|', at)) != std::string::npos; at += 2) text.insert(at, 1, '\\');
  return text;
}

std::string bound(double value) {
  const std::string text = show(Literal(value));
  return text.size() > 2 && text.substr(text.size() - 2) == ".0" ? text.substr(0, text.size() - 2) : text;
}

class Writer {
 public:
  std::string out;

  void schema(const Schema& schema, const std::string& level) {
    for (const ChapterHead& chapter : schema.chapters) {
      out += level + " " + chapter.title + "\n\n";
      std::string rows;
      for (size_t i = 0; i < chapter.field_count; ++i) {
        const Field& field = schema.root.fields[chapter.first_field + i];
        if (!field.is_section()) row(field, field.name, "", rows);
      }
      flush(rows);
      for (size_t i = 0; i < chapter.field_count; ++i) {
        const Field& field = schema.root.fields[chapter.first_field + i];
        if (field.is_section()) section(field, level + "#");
      }
    }
    if (schema.rules.empty()) return;
    out += level + " Rules between keys\n\n";
    for (const Rule& rule : schema.rules) out += "- " + rule.doc + "\n";
    out += "\n";
  }

 private:
  void flush(const std::string& rows) {
    if (rows.empty()) return;
    out += "| key | type | default | meaning |\n|---|---|---|---|\n" + rows + "\n";
  }

  void row(const Field& field, const std::string& path, const std::string& outer, std::string& rows) {
    const std::string pending = pending_feature(field, outer);
    std::string meaning = field.doc;
    const std::string limits = limits_of(field);
    if (!limits.empty()) meaning += " Allowed: " + limits + ".";
    if (field.is_required) meaning += " Required.";
    for (const std::string& alias : field.aliases) meaning += " Also accepted as `" + alias + "`.";
    if (!field.environment.empty()) meaning += " The environment variable `" + field.environment + "` overrides it.";
    if (field.is_deprecated) {
      meaning += field.replaced_by.empty() ? " *Deprecated.*"
                                           : " *Deprecated: use `" + field.replaced_by + "`" +
                                                 (field.forwarded ? ", which gets its value.*" : ".*");
    }
    if (!field.no_effect_because.empty())
      meaning += " *Accepted, no effect here, because " + field.no_effect_because + ".*";
    if (field.unbuilt && !field.unbuilt->values.empty()) {
      std::string values;
      for (const Literal& value : field.unbuilt->values) values += (values.empty() ? "" : ", ") + show(value);
      meaning += " *Not built yet: " + values + ".*";
    } else if (!pending.empty() && outer.empty()) {
      meaning += " *Not built yet: " + pending + ".*";
    }
    std::string fallback = field.is_section()  ? (field.null_when_absent ? "null" : "")
                           : field.is_required ? ""
                                               : "`" + show(field.fallback) + "`";
    if (!field.fallback_note.empty()) fallback += " (" + field.fallback_note + ")";
    rows += "| `" + path + "` | " + cell(type_of(field)) + " | " + cell(fallback) + " | " + cell(meaning) + " |\n";
  }

  static std::string type_of(const Field& field) {
    std::string type = type_name(field.kinds);
    if ((field.kinds & kList) && field.item_kinds) {
      const size_t at = type.find("list");
      type.replace(at, 4, "list of " + type_name(field.item_kinds));
    }
    return type;
  }

  void rows_of(const Field& section, const std::string& path, const std::string& outer, std::string& rows) {
    for (const Field& field : section.fields) {
      const std::string here = join_path(path, field.name);
      row(field, here, outer, rows);
      rows_of(field, here, pending_feature(field, outer), rows);
    }
  }

  void section(const Field& field, const std::string& level) {
    out += level + " `" + field.name + "`\n\n" + field.doc;
    for (const std::string& alias : field.aliases) out += " Also accepted as `" + alias + "`.";
    if (field.validated) out += " A value \"auto\" stands for the default.";
    if (!field.bool_key.empty())
      out +=
          " A bare `true` or `false` " + (field.bool_doc.empty() ? "sets `" + field.bool_key + "`." : field.bool_doc);
    if (field.unknown == Unknown::kIgnore) out += " Unknown keys are ignored with a warning.";
    if (field.unknown == Unknown::kKeep) {
      out += " Other keys are kept as given";
      out += field.unknown_because.empty() ? "." : "; they have no effect here, because " + field.unknown_because + ".";
    }
    const std::string pending = pending_feature(field, "");
    if (!pending.empty()) out += " **Known, not built yet: " + pending + ".**";
    out += "\n\n";
    std::string rows;
    rows_of(field, "", pending, rows);
    flush(rows);
    for (const Field& key : field.fields) {
      for (const auto& [chosen, fields] : key.variants) {
        out += "`" + field.name + "." + key.name + "` of " + chosen + ":\n\n";
        std::string lines;
        for (const Field& param : fields) row(param, param.name, "", lines);
        flush(lines);
      }
    }
  }
};

}  // namespace

std::string limits_of(const Field& field) {
  std::string out;
  for (const Literal& choice : field.choices) out += (out.empty() ? "" : ", ") + show(choice);
  if (!field.open_choices.empty()) out += ", " + field.open_choices;
  for (const Literal& choice : field.item_choices) out += (out.empty() ? "" : ", ") + show(choice);
  if (field.minimum)
    out +=
        (out.empty() ? "" : ", ") + std::string(field.above_minimum ? "above " : "at least ") + bound(*field.minimum);
  if (field.maximum)
    out += (out.empty() ? "" : ", ") + std::string(field.below_maximum ? "below " : "at most ") + bound(*field.maximum);
  if (field.item_minimum)
    out += (out.empty() ? "" : ", ") + std::string("items at least ") + bound(*field.item_minimum);
  if (field.item_below) out += (out.empty() ? "" : ", ") + std::string("items below ") + bound(*field.item_below);
  if (field.item_count) out += (out.empty() ? "" : ", ") + std::to_string(*field.item_count) + " items";
  return out;
}

std::string docs() {
  Writer w;
  w.out =
      "# Configuration\n\n"
      "Generated by `ds_config docs` from csrc/config/sections; do not edit.\n\n"
      "`deepspeed.initialize(config=...)` takes a dict, the path of a JSON file or url-safe base64 of JSON. Files may "
      "hold\n"
      "comments (`//`, `/* */`, `#`) and trailing commas; `5e8` is an integer. Inside a section an unknown key is an "
      "error\n"
      "that names the nearest known one. An unknown key at the top is a warning, and an error when it is within two "
      "edits\n"
      "of a known key or when `DS_STRICT_CONFIG=1` is set. `ds_config explain FILE` shows every value and its "
      "origin.\n\n"
      "`train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel ranks`. Give "
      "all\n"
      "three or leave some out: a missing third is derived; `train_batch_size` or `train_micro_batch_size_per_gpu` "
      "alone\n"
      "means accumulation 1.\n\n";
  w.schema(schema(Root::kTraining), "##");
  w.out +=
      "## Inference: `deepspeed.init_inference`\n\nKeywords override the config; the same key with two values is an "
      "error.\n\n";
  w.schema(schema(Root::kInference), "###");
  w.out += "## Ragged inference\n\n";
  w.schema(schema(Root::kRaggedInference), "###");
  while (w.out.size() > 1 && w.out[w.out.size() - 2] == '\n') w.out.pop_back();
  return w.out;
}

}  // namespace ds::config
