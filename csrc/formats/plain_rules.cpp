#include "formats/plain_rules.h"

#include <initializer_list>
#include <string>

#include "base/ranges.h"
#include "formats/format_error.h"
#include "formats/graph_builder.h"
#include "formats/text_forms.h"

namespace ds::formats {
namespace {

constexpr int64_t kLongestRange = int64_t{1} << 62;
constexpr size_t kLongestFraction = 4000;  // digits: "1e999999999" is text that Fraction would write out in full

using Builder = GraphBuilder;

bool is_any(const Builder& b, Ref ref, std::initializer_list<Kind> kinds) {
  for (const Kind kind : kinds) {
    if (b.is(ref, kind)) return true;
  }
  return false;
}

bool is_number(const Builder& b, Ref ref) {
  return b.is_integer(ref) || b.is(ref, Kind::kBool) || b.is(ref, Kind::kFloat);
}

bool is_scalar(const Builder& b, Ref ref) {
  return is_number(b, ref) || is_any(b, ref, {Kind::kNone, Kind::kText, Kind::kBytes}) ||
         b.is_object_of(ref, "builtins", "complex");
}

std::vector<Ref> copied(const Builder& b, Ref source) {
  size_t count;
  const Ref* items = b.items_of(source, &count);
  return {items, items + count};
}

bool is_mapping(const Builder& b, Ref ref) {
  return b.is(ref, Kind::kDict) || (b.is(ref, Kind::kObject) && b.has_contents(ref));
}

std::vector<Ref> keys_of(const Builder& b, Ref source) {
  std::vector<Ref> items = copied(b, source), keys;
  for (size_t i = 0; i < items.size(); i += 2) keys.push_back(items[i]);
  return keys;
}

std::vector<Ref> items_for(const Builder& b, const Ref* a, size_t n, const char* what) {
  need(n < 2, what);
  if (n == 0) return {};
  if (is_mapping(b, a[0])) return keys_of(b, a[0]);
  need(is_any(b, a[0], {Kind::kList, Kind::kTuple, Kind::kSet, Kind::kFrozenSet}), what);
  return copied(b, a[0]);
}

std::vector<Ref> pairs_for(const Builder& b, const Ref* a, size_t n) {
  need(n < 2, "a mapping of several things");
  if (n == 0) return {};
  if (is_mapping(b, a[0])) return copied(b, a[0]);
  need(is_any(b, a[0], {Kind::kList, Kind::kTuple}), "a mapping of something else");
  std::vector<Ref> pairs;
  for (const Ref pair : copied(b, a[0])) {
    need(is_any(b, pair, {Kind::kList, Kind::kTuple}), "a mapping of something else");
    const std::vector<Ref> both = copied(b, pair);
    need(both.size() == 2, "a mapping of no pairs");
    append(pairs, both);
  }
  return pairs;
}

// ---- calls that the graph does itself
// ----------------------------------------------------------------------------------
Ref make_list(Builder& b, Ref, const Ref* a, size_t n) { return b.list(items_for(b, a, n, "list of something else")); }

Ref make_set(Builder& b, Ref, const Ref* a, size_t n) { return b.set(items_for(b, a, n, "set of something else")); }

Ref make_tuple(Builder& b, Ref, const Ref* a, size_t n) {
  const std::vector<Ref> items = items_for(b, a, n, "tuple of something else");
  return b.tuple(items.data(), items.size());
}

Ref make_frozenset(Builder& b, Ref, const Ref* a, size_t n) {
  const std::vector<Ref> items = items_for(b, a, n, "frozenset of something else");
  return b.tuple(items.data(), items.size(), Kind::kFrozenSet);
}

Ref make_dict(Builder& b, Ref, const Ref* a, size_t n) { return b.dict(pairs_for(b, a, n)); }

Ref make_mapping(Builder& b, Ref cls, const Ref* a, size_t n) {
  const std::vector<Ref> pairs = pairs_for(b, a, n);
  const Ref made = b.object(Call::kReduce, cls, nullptr, 0, true);
  if (!pairs.empty()) b.set_items(made, pairs.data(), pairs.size());
  return made;
}

Ref make_defaultdict(Builder& b, Ref cls, const Ref* a, size_t n) {
  const Ref factory = n == 0 ? b.none() : a[0];
  bool known = b.is(factory, Kind::kNone);
  for (const char* name : {"bool", "dict", "float", "int", "list", "set", "str", "tuple"})
    known = known || b.is_global(factory, "builtins", name);
  for (const char* name : {"Counter", "OrderedDict", "deque"})
    known = known || b.is_global(factory, "collections", name);
  need(known, "defaultdict of something that is not a container or number");
  const std::vector<Ref> pairs = pairs_for(b, a + 1, n == 0 ? 0 : n - 1);
  b.count_unguarded();
  const Ref made = b.object(Call::kReduce, cls, &factory, 1, true);
  if (!pairs.empty()) b.set_items(made, pairs.data(), pairs.size());
  return made;
}

Ref make_text(Builder& b, Ref, const Ref* a, size_t n) {
  need(n == 0 || (n == 1 && b.is(a[0], Kind::kText)), "str of something else");
  return n == 0 ? b.text(Kind::kText, {}) : a[0];
}

Ref encoded(Builder& b, Ref text, std::string_view encoding, Kind kind) {
  if (encoding == "utf-8") {
    need(is_utf8(b.text_of(text), false), "text that UTF-8 has no bytes for");
    return b.text(kind, b.text_of(text));
  }
  std::string bytes;
  need(latin1_of(b.text_of(text), &bytes), "text that latin-1 has no bytes for");
  return b.owned_text(kind, std::move(bytes));
}

bool says_latin1(const Builder& b, Ref ref) {
  return b.is(ref, Kind::kText) && (b.text_of(ref) == "latin1" || b.text_of(ref) == "latin-1");
}

Ref make_raw(Builder& b, Ref cls, const Ref* a, size_t n) {
  const Kind kind = b.global_of(cls).name == "bytes" ? Kind::kBytes : Kind::kByteArray;
  if (n == 2 && b.is(a[0], Kind::kText) && says_latin1(b, a[1])) return encoded(b, a[0], "latin1", kind);
  need(n == 0 || (n == 1 && is_any(b, a[0], {Kind::kBytes, Kind::kByteArray, Kind::kList})), "bytes of something else");
  if (n == 0) return b.text(kind, {});
  if (!b.is(a[0], Kind::kList)) return b.text(kind, b.text_of(a[0]));
  std::string bytes;
  for (const Ref item : copied(b, a[0])) {
    need(b.is(item, Kind::kInt) && b.node(item).number >= 0 && b.node(item).number < 256,
         "bytes must be in range(0, 256)");
    bytes.push_back(static_cast<char>(b.node(item).number));
  }
  return b.owned_text(kind, std::move(bytes));
}

Ref encode(Builder& b, Ref, const Ref* a, size_t n) {
  need((n == 1 || n == 2) && b.is(a[0], Kind::kText), "encode of something else");
  if (n == 1 || (b.is(a[1], Kind::kText) && b.text_of(a[1]) == "utf-8")) return encoded(b, a[0], "utf-8", Kind::kBytes);
  need(says_latin1(b, a[1]), "encode of something else");
  return encoded(b, a[0], "latin1", Kind::kBytes);
}

// ---- calls of Python's classes, with arguments that were looked at
// -------------------------------------------------------
Ref of_numbers(Builder& b, Ref cls, const Ref* a, size_t n) {
  const bool complex = b.global_of(cls).name == "complex";
  for (size_t i = 0; i < n; ++i) {
    need(is_number(b, a[i]) || (complex && b.is_object_of(a[i], "builtins", "complex")), "a number of something else");
  }
  return b.object(Call::kReduce, cls, a, n);
}

Ref make_range(Builder& b, Ref cls, const Ref* a, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    need(b.is_integer(a[i]) || b.is(a[i], Kind::kBool), "range of something else");
    need(b.is(a[i], Kind::kBool) ||
             (b.is(a[i], Kind::kInt) && b.node(a[i]).number < kLongestRange && b.node(a[i]).number > -kLongestRange),
         "range of huge numbers");
  }
  return b.object(Call::kReduce, cls, a, n);
}

Ref make_slice(Builder& b, Ref cls, const Ref* a, size_t n) {
  for (size_t i = 0; i < n; ++i) need(b.is_integer(a[i]) || b.is(a[i], Kind::kNone), "slice of something else");
  return b.object(Call::kReduce, cls, a, n);
}

Ref make_deque(Builder& b, Ref cls, const Ref* a, size_t n) {
  need(n <= 2 && (n == 0 || is_any(b, a[0], {Kind::kList, Kind::kTuple})) &&
           (n < 2 || is_any(b, a[1], {Kind::kNone, Kind::kInt})),
       "deque of something else");
  b.count_unguarded();
  return b.object(Call::kReduce, cls, a, n);
}

Ref of_scalars(Builder& b, Ref cls, const Ref* a, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    need(is_scalar(b, a[i]) || b.is_object_of(a[i], "datetime", "timezone") ||
             b.is_object_of(a[i], "datetime", "timedelta"),
         "a date or time of something else");
  }
  return b.object(Call::kReduce, cls, a, n);
}

Ref of_texts(Builder& b, Ref cls, const Ref* a, size_t n) {
  for (size_t i = 0; i < n; ++i) need(b.is(a[i], Kind::kText), "a path or number of something else than text");
  return b.object(Call::kReduce, cls, a, n);
}

bool is_fraction(std::string_view text) {
  const auto digits = [&text] {
    size_t found = 0;
    while (!text.empty() && text[0] >= '0' && text[0] <= '9') {
      text.remove_prefix(1);
      ++found;
    }
    return found >= 1 && found <= kLongestFraction;
  };
  if (!text.empty() && (text[0] == '+' || text[0] == '-')) text.remove_prefix(1);
  if (!digits()) return false;
  if (text.empty()) return true;
  if (text[0] != '/') return false;
  text.remove_prefix(1);
  return digits() && text.empty();
}

Ref make_fraction(Builder& b, Ref cls, const Ref* a, size_t n) {
  need(n <= 2, "Fraction of several things");
  for (size_t i = 0; i < n; ++i) {
    need(b.is_integer(a[i]) || (b.is(a[i], Kind::kText) && is_fraction(b.text_of(a[i]))), "Fraction of something else");
  }
  return b.object(Call::kReduce, cls, a, n);
}

Ref one_scalar(Builder& b, Ref cls, const Ref* a, size_t n) {
  need(n == 1 && is_scalar(b, a[0]), "an enum of several values");
  return b.object(Call::kReduce, cls, a, n);
}

Ref of_nothing(Builder& b, Ref cls, const Ref*, size_t n) {
  need(n == 0, "arguments for an empty object");
  return b.object(Call::kReduce, cls, nullptr, 0);
}

// Old objects: copyreg._reconstructor(class, base, state).
Ref reconstruct(Builder& b, Ref, const Ref* a, size_t n) {
  need(n == 3 && b.is(a[0], Kind::kGlobal) && b.is(a[1], Kind::kGlobal), "an object of no class");
  return b.call(Call::kNew, a[0], a + 2, b.is_global(a[1], "builtins", "object") ? 0 : 1);
}

// Enum members are pickled as getattr(class, name) by Python 3.11.
Ref named_member(Builder& b, Ref function, const Ref* a, size_t n) {
  need(n == 2 && b.is(a[1], Kind::kText), "getattr of something that is not a name");
  const bool is_enum =
      b.is(a[0], Kind::kGlobal) && (b.global_of(a[0]).is_enum || b.is_global(a[0], "uuid", "SafeUUID"));
  if (!is_enum) throw RefusedName("builtins.getattr");
  return b.object(Call::kReduce, function, a, n);
}

}  // namespace

std::vector<Rule> plain_rules() {
  constexpr std::string_view kB = "builtins", kC = "collections", kT = "datetime";
  std::vector<Rule> rules = {
      {kB, "bool", of_numbers, Rule::kNoState, true},
      {kB, "bytearray", make_raw},
      {kB, "bytes", make_raw},
      {kB, "complex", of_numbers, Rule::kNoState, true},
      {kB, "dict", make_dict},
      {kB, "float", of_numbers, Rule::kNoState, true},
      {kB, "frozenset", make_frozenset},
      {kB, "getattr", named_member, Rule::kNoState, true},
      {kB, "int", of_numbers, Rule::kNoState, true},
      {kB, "list", make_list},
      {kB, "object", nullptr},
      {kB, "range", make_range, Rule::kNoState, true},
      {kB, "set", make_set},
      {kB, "slice", make_slice},
      {kB, "str", make_text},
      {kB, "tuple", make_tuple},
      {kB, "Ellipsis", nullptr},
      {kB, "NotImplemented", nullptr},
      {kC, "Counter", make_mapping, Rule::kAttributes},
      {kC, "OrderedDict", make_mapping, Rule::kAttributes},
      {kC, "defaultdict", make_defaultdict},
      {kC, "deque", make_deque},
      {kT, "date", of_scalars, Rule::kNoState, true},
      {kT, "datetime", of_scalars, Rule::kNoState, true},
      {kT, "time", of_scalars, Rule::kNoState, true},
      {kT, "timedelta", of_scalars, Rule::kNoState, true},
      {kT, "timezone", of_scalars, Rule::kNoState, true},
      {"decimal", "Decimal", of_texts, Rule::kNoState, true},
      {"fractions", "Fraction", make_fraction},
      {"uuid", "UUID", of_nothing, Rule::kOwnState},
      {"uuid", "SafeUUID", one_scalar, Rule::kNoState, true},
      {"argparse", "Namespace", of_nothing, Rule::kAttributes},
      {"types", "SimpleNamespace", of_nothing, Rule::kAttributes},
      {"_codecs", "encode", encode},
      {"copyreg", "_reconstructor", reconstruct},
  };
  for (const std::string_view path : {"PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"})
    rules.push_back({"pathlib", path, of_texts});
  return rules;
}

}  // namespace ds::formats
