#include "config/field.h"

namespace ds::config {

const std::vector<std::string> kWhenPresent{"*present*"};

namespace {

Field make(std::string name, unsigned kinds, Literal fallback, std::string doc) {
  Field f;
  f.name = std::move(name);
  f.kinds = kinds;
  f.doc = std::move(doc);
  if (fallback.is_null()) f.kinds |= kNull;
  f.fallback = std::move(fallback);
  return f;
}

struct KindWords {
  unsigned kind;
  const char* words;
  const char* name;
};
constexpr KindWords kWords[] = {
    {kBool, "true or false", "bool"},
    {kInt, "an integer", "int"},
    {kFloat, "a number", "float"},
    {kInfinity, "infinity", "inf"},
    {kText, "a text", "str"},
    {kList, "a list", "list"},
    {kTable, "an object", "object"},
    {kSection, "a section {...}", "object"},
    {kPython, "a Python object", "Python object"},
    {kAnything, "anything", "any"},
    {kNull, "null", "null"},
};

}  // namespace

const Field* find_field(const std::vector<Field>& fields, const std::string& key) {
  for (const Field& f : fields) {
    if (f.is_wildcard()) continue;
    if (f.name == key) return &f;
    for (const std::string& other : f.aliases) {
      if (other == key) return &f;
    }
  }
  return nullptr;
}

const Field* Field::find(const std::string& key) const {
  if (const Field* exact = find_field(fields, key)) return exact;
  for (const Field& f : fields) {
    if (f.is_wildcard()) return &f;
  }
  return nullptr;
}

Field boolean(std::string name, bool fallback, std::string doc) {
  return make(std::move(name), kBool, fallback, std::move(doc));
}
Field integer(std::string name, Literal fallback, std::string doc) {
  return make(std::move(name), kInt, std::move(fallback), std::move(doc));
}
Field number(std::string name, Literal fallback, std::string doc) {
  return make(std::move(name), kFloat, std::move(fallback), std::move(doc));
}
Field text(std::string name, Literal fallback, std::string doc) {
  return make(std::move(name), kText, std::move(fallback), std::move(doc));
}
Field list(std::string name, Literal fallback, std::string doc) {
  return make(std::move(name), kList, std::move(fallback), std::move(doc));
}
Field table(std::string name, Literal fallback, std::string doc) {
  return make(std::move(name), kTable, std::move(fallback), std::move(doc));
}
Field anything(std::string name, Literal fallback, std::string doc) {
  return make(std::move(name), kAnything, std::move(fallback), std::move(doc));
}
Field python(std::string name, Literal fallback, std::string doc) {
  return make(std::move(name), kPython, std::move(fallback), std::move(doc));
}
Field section(std::string name, std::string doc, std::vector<Field> fields) {
  Field f = make(std::move(name), kSection, EmptyTable{}, std::move(doc));
  f.fields = std::move(fields);
  return f;
}
Field validated(std::string name, std::string doc, std::vector<Field> fields) {
  Field f = section(std::move(name), std::move(doc), std::move(fields));
  f.validated = true;
  return f;
}

std::string describe_kinds(const Field& field) {
  std::vector<std::string> parts;
  for (const KindWords& k : kWords) {
    if (field.kinds & k.kind) parts.push_back(k.words);
  }
  if ((field.kinds & kList) && field.item_kinds) {
    for (std::string& part : parts) {
      if (part != "a list") continue;
      part = (field.item_kinds & kText)    ? "a list of texts"
             : (field.item_kinds & kFloat) ? "a list of numbers"
                                           : "a list of integers";
    }
  }
  std::string out;
  for (size_t i = 0; i < parts.size(); ++i) out += (i == 0 ? "" : i + 1 == parts.size() ? " or " : ", ") + parts[i];
  return out;
}

std::string type_name(unsigned kinds) {
  std::string out;
  for (const KindWords& k : kWords) {
    if (!(kinds & k.kind) || out == k.name) continue;
    out += (out.empty() ? "" : " | ") + std::string(k.name);
  }
  return out;
}

}  // namespace ds::config
