// A configuration key is one Field: its type, default, range or choices, doc line, other names. Everything else in
// this room (checking, docs, JSON schema, explain) reads Fields and knows no key by name.
//
//   integer("reduce_bucket_size", 500000000, "Elements per reduction bucket.").at_least(0)
//
// A key whose feature is not there yet says so with not_built(); deleting that call is all it takes to open it. A key
// that is accepted and changes nothing says so with no_effect("the reason").
// Nothing here needs a JSON library, so that the section files compile in a moment.
#pragma once
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/error.h"

namespace ds::config {

struct EmptyTable {};

// A constant in a schema: what a default or a choice can be.
struct Literal {
  using Variant = std::variant<std::nullptr_t, bool, int64_t, double, std::string, std::vector<std::string>,
                               std::vector<int64_t>, std::vector<double>, EmptyTable>;
  Variant value = nullptr;

  Literal() = default;
  Literal(std::nullptr_t) {}
  Literal(bool v) : value(v) {}
  Literal(int v) : value(static_cast<int64_t>(v)) {}
  Literal(int64_t v) : value(v) {}
  Literal(double v) : value(v) {}
  Literal(const char* v) : value(std::string(v)) {}
  Literal(std::string v) : value(std::move(v)) {}
  Literal(std::vector<std::string> v) : value(std::move(v)) {}
  Literal(std::vector<int64_t> v) : value(std::move(v)) {}
  Literal(std::vector<double> v) : value(std::move(v)) {}
  Literal(EmptyTable v) : value(v) {}
  bool is_null() const { return std::holds_alternative<std::nullptr_t>(value); }
};

// A kind of value. A Field holds a set of them.
enum Kind : unsigned {
  kBool = 1u << 0,
  kInt = 1u << 1,       // also 5e8 and 3.0: any finite number without a fraction
  kFloat = 1u << 2,     // finite
  kInfinity = 1u << 3,  // +inf, in addition to kInt or kFloat
  kText = 1u << 4,
  kList = 1u << 5,
  kTable = 1u << 6,  // an object with keys of the user's own
  kNull = 1u << 7,
  kPython = 1u << 8,  // a value that only a Python dict can hold: torch.dtype, process group, callable
  kSection = 1u << 9,
  kAnything = 1u << 10,
};

// The treatment of an unknown key inside a section.
enum class Unknown {
  kError,    // with the nearest known key
  kKeep,     // handed to the feature as given
  kIgnore,   // dropped with a warning: clients are known to send some
  kPrivate,  // dropped with a warning, unless it is a typing error of a known key
};

// A feature that does not exist yet, and what would switch it on.
struct NotBuilt {
  std::string feature;
  std::vector<std::string> switches;  // sections: keys below that switch it on when they differ from the default;
                                      // kWhenPresent: the section itself
  std::vector<Literal> values;        // plain keys: the values that need it; none: every value but the default
  bool inert = false;                 // only tunes the feature and cannot switch it on: accepted
};
extern const std::vector<std::string> kWhenPresent;

struct Field {
  std::string name;  // "<group name>" or "*" stands for keys of the user's own
  std::string doc;
  unsigned kinds = 0;
  Literal fallback;
  std::string fallback_note;  // says how the default is computed, where it is not a constant
  std::optional<double> minimum, maximum;
  bool above_minimum = false, below_maximum = false;  // the bound itself is excluded
  std::vector<Literal> choices;
  bool any_case = false;     // choices match in any case and are stored as spelled here
  std::string open_choices;  // not empty: other texts pass too, and this says which
  unsigned item_kinds = 0;   // lists: kinds of each item; 0 is anything
  std::vector<Literal> item_choices;
  std::optional<double> item_minimum, item_below;  // the second is excluded
  std::optional<size_t> item_count;
  bool unique_items = false;     // lists: later copies of an item are dropped
  bool null_is_default = false;  // a null stands for the default
  std::vector<std::string> aliases;
  bool aliases_yield = false;   // an alias beside the name is ignored with a warning, not refused
  std::string environment;      // a variable that overrides the key in a whole configuration; empty for none
  std::string replaced_by;      // the successor of a deprecated key: dotted, from the section the key is in
  bool is_deprecated = false;   // with or without a successor
  bool forwarded = false;       // its value is carried over to the successor
  std::string forward_true_as;  // the one-key table {first: second} that `true` stands for in the new key
  std::string forward_true_value;
  std::optional<NotBuilt> unbuilt;
  bool truthy_text = false;       // a text that is not empty stands for true, with a warning
  std::string other_text_is;      // not empty: a text that resembles no choice is read as this choice, with a warning
  std::vector<Literal> also_off;  // further values that switch nothing on, of a key whose feature is not built
  std::string no_effect_because;  // not empty: the key is accepted and changes nothing here, and this says why
  ErrorKind violation = ErrorKind::kConfig;  // for a value outside choices or range
  std::string violation_words;               // with which its message begins
  bool is_required = false;
  bool is_secret = false;  // logs, reports and files show "***" for the value

  // Sections only.
  std::vector<Field> fields;
  bool validated = false;  // "auto" stands for "not given"
  Unknown unknown = Unknown::kError;
  std::map<std::string, std::string> old_keys;  // keys of older releases that are ignored, each with what holds instead
  std::string unknown_because;  // kKeep: why such keys change nothing here; empty: they may
  std::string bool_key;         // a bare true or false sets this key ...
  Literal bool_true, bool_false;
  std::string bool_doc;
  bool null_when_absent = false;
  bool present_by_bool = false;  // true is an empty section, false the same as none
  std::string wrap_items;        // a bare text is accepted for a list (set on list fields of the section)
  // Named sets of keys that another key of the section selects: optimizer.params by optimizer.type.
  std::string variant_key;
  std::map<std::string, std::vector<Field>> variants;

  bool is_section() const { return (kinds & kSection) != 0; }
  bool is_wildcard() const { return !name.empty() && (name[0] == '<' || name == "*"); }
  const Field* find(const std::string& key) const;  // by name or alias; else the wildcard; else nullptr

  Field& at_least(double v) {
    minimum = v;
    return *this;
  }
  Field& at_most(double v) {
    maximum = v;
    return *this;
  }
  Field& above(double v) {
    minimum = v;
    above_minimum = true;
    return *this;
  }
  Field& below(double v) {
    maximum = v;
    below_maximum = true;
    return *this;
  }
  Field& one_of(std::vector<Literal> v) {
    choices = std::move(v);
    return *this;
  }
  Field& one_of_any_case(std::vector<Literal> v) {
    any_case = true;
    return one_of(std::move(v));
  }
  Field& or_other(std::string what) {
    open_choices = std::move(what);
    return *this;
  }
  Field& also(unsigned more) {
    kinds |= more;
    return *this;
  }
  Field& or_null() { return also(kNull); }
  Field& items(unsigned item) {
    item_kinds = item;
    return *this;
  }
  Field& items_one_of(std::vector<Literal> v) {
    item_kinds = kText;
    item_choices = std::move(v);
    return *this;
  }
  Field& items_at_least(double v) {
    item_minimum = v;
    return *this;
  }
  Field& items_below(double v) {
    item_below = v;
    return *this;
  }
  Field& exactly(size_t count) {
    item_count = count;
    return *this;
  }
  Field& unique() {
    unique_items = true;
    return *this;
  }
  Field& null_for_default() {
    null_is_default = true;
    return also(kNull);
  }
  Field& bare_text() {
    wrap_items = "text";
    return *this;
  }
  Field& alias(std::string v) {
    aliases.push_back(std::move(v));
    return *this;
  }
  Field& alias_when_absent(std::string v) {
    aliases_yield = true;
    return alias(std::move(v));
  }
  Field& overridden_by(std::string variable) {
    environment = std::move(variable);
    return *this;
  }
  Field& computed(std::string how) {
    fallback_note = std::move(how);
    return *this;
  }
  Field& required() {
    is_required = true;
    return *this;
  }
  Field& raises(ErrorKind v, std::string words = "") {
    violation = v;
    violation_words = std::move(words);
    return *this;
  }
  Field& secret() {
    is_secret = true;
    return *this;
  }
  Field& deprecated() {
    is_deprecated = true;
    return *this;
  }
  Field& deprecated_for(std::string key) {
    is_deprecated = true;
    replaced_by = std::move(key);
    return *this;
  }
  Field& forwards() {
    forwarded = true;
    return *this;
  }
  Field& forwards_true_as(std::string key, std::string v) {
    forwarded = true;
    forward_true_as = std::move(key);
    forward_true_value = std::move(v);
    return *this;
  }
  Field& not_built(std::string feature, std::vector<std::string> switches = {"enabled"}) {
    unbuilt = NotBuilt{std::move(feature), std::move(switches), {}, false};
    return *this;
  }
  Field& not_built_values(std::string feature, std::vector<Literal> v) {
    unbuilt = NotBuilt{std::move(feature), {}, std::move(v), false};
    return *this;
  }
  Field& waits_for(std::string feature) {
    unbuilt = NotBuilt{std::move(feature), {}, {}, true};
    return *this;
  }
  // `because` follows the word "because" in messages and in the reference.
  Field& no_effect(std::string because) {
    no_effect_because = std::move(because);
    return *this;
  }
  // `no_effect`: why these keys change nothing, as above; empty: they may.
  Field& keeps_unknown(std::string no_effect = "") {
    unknown = Unknown::kKeep;
    unknown_because = std::move(no_effect);
    return *this;
  }
  Field& ignores_unknown() {
    unknown = Unknown::kIgnore;
    return *this;
  }
  // Also in the sections inside of this one.
  Field& ignores_private() {
    unknown = Unknown::kPrivate;
    for (Field& field : fields)
      if (field.is_section() && field.unknown == Unknown::kError) field.ignores_private();
    return *this;
  }
  // A key that older releases wrote or accepted; the warning says `instead`.
  Field& ignores_old(std::string key, std::string instead) {
    old_keys[std::move(key)] = std::move(instead);
    return *this;
  }
  Field& true_for_any_text() {
    truthy_text = true;
    return *this;
  }
  Field& reads_other_text_as(std::string choice) {
    other_text_is = std::move(choice);
    return *this;
  }
  Field& off_at(Literal v) {
    also_off.push_back(std::move(v));
    return *this;
  }
  Field& bool_sets(std::string key, Literal on, Literal off, std::string what) {
    also(kBool);
    bool_key = std::move(key);
    bool_true = std::move(on);
    bool_false = std::move(off);
    bool_doc = std::move(what);
    return *this;
  }
  Field& fallback_to(Literal v) {
    fallback = std::move(v);
    return *this;
  }
  Field& bool_is_presence() {
    present_by_bool = true;
    kinds |= kBool;
    return *this;
  }
  Field& absent_is_null() {
    null_when_absent = true;
    kinds |= kNull;
    return *this;
  }
  Field& variants_by(std::string key, std::map<std::string, std::vector<Field>> sets) {
    variant_key = std::move(key);
    variants = std::move(sets);
    return *this;
  }
};

Field boolean(std::string name, bool fallback, std::string doc);
inline Field enabled() { return boolean("enabled", false, "Switch it on."); }  // of a section
Field integer(std::string name, Literal fallback, std::string doc);            // a null default admits null
Field number(std::string name, Literal fallback, std::string doc);
Field text(std::string name, Literal fallback, std::string doc);
Field list(std::string name, Literal fallback, std::string doc);
Field table(std::string name, Literal fallback, std::string doc);  // an object that is handed on as given
Field anything(std::string name, Literal fallback, std::string doc);
Field python(std::string name, Literal fallback, std::string doc);  // an object of the caller's program, or null
// Unknown keys are errors; in a validated section "auto" additionally stands for "not given".
Field section(std::string name, std::string doc, std::vector<Field> fields);
Field validated(std::string name, std::string doc, std::vector<Field> fields);

// By name or alias; never a wildcard. nullptr when there is none.
const Field* find_field(const std::vector<Field>& fields, const std::string& key);
std::string describe_kinds(const Field& field);  // "an integer or null"
std::string type_name(unsigned kinds);           // "int | null", for tables

}  // namespace ds::config
