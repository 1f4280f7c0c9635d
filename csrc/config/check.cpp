#include "config/check.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <optional>

#include "base/ranges.h"
#include "config/nearest.h"
#include "config/text.h"

namespace ds::config {

namespace {

// The number a text holds, as JSON would write it; empty when it holds none.
std::string number_in(const std::string& text) {
  if (text.empty() || text.size() > 32) return "";
  char* end = nullptr;
  const double x = std::strtod(text.c_str(), &end);
  return *end == '\0' && std::isfinite(x) ? text : "";
}

CheckResult refuse(std::string problem, std::string suggestion = "") {
  CheckResult v;
  v.problem = std::move(problem);
  v.suggestion = std::move(suggestion);
  return v;
}

CheckResult accept(Value value) {
  CheckResult v;
  v.value = std::move(value);
  return v;
}

CheckResult wrong_type(const Field& field, const Value& value) {
  std::string suggestion;
  if (value.is_string()) {
    const std::string& text = value.get_ref<const std::string&>();
    const std::string small = lower(text);
    if (text == "auto") {
      suggestion = "\"auto\" is a blank that a trainer fills in before deepspeed sees it; write a value here.";
    } else if ((field.kinds & kBool) && (small == "true" || small == "yes" || small == "on" || small == "1")) {
      suggestion = "Write true without quotes.";
    } else if ((field.kinds & kBool) && (small == "false" || small == "no" || small == "off" || small == "0")) {
      suggestion = "Write false without quotes.";
    } else if ((field.kinds & (kInt | kFloat)) && !number_in(text).empty()) {
      suggestion = "Write " + text + " without quotes.";
    } else if ((field.kinds & kList) && (field.item_kinds & kText)) {
      suggestion = "Write [" + show(value) + "].";
    }
  } else if ((field.kinds & kInt) && !(field.kinds & kFloat) && value.is_number_float() &&
             std::isfinite(value.get<double>()) && std::abs(value.get<double>()) < 9e15) {
    suggestion = "Did you mean " + std::to_string(static_cast<int64_t>(std::floor(value.get<double>()))) + "?";
  } else if ((field.kinds & kBool) && value.is_number()) {
    suggestion = std::string("Did you mean ") + (value == 0 ? "false" : "true") + "?";
  } else if ((field.kinds & kList) && !value.is_object() && !value.is_null()) {
    suggestion = "Write [" + show(value) + "].";
  } else if (field.kinds & kText && !field.choices.empty() && value.is_boolean()) {
    for (const Literal& choice : field.choices)
      suggestion += (suggestion.empty() ? "Choose one of " : ", ") + show(choice);
    suggestion += ".";
  }
  return refuse("must be " + describe_kinds(field), suggestion);
}

CheckResult check_range(const Field& field, const Value& value) {
  const double x = value.get<double>();
  std::string bound;
  if (field.minimum && (field.above_minimum ? x <= *field.minimum : x < *field.minimum)) {
    bound = (field.above_minimum ? "greater than " : "at least ") + show(Literal(*field.minimum));
  } else if (field.maximum && (field.below_maximum ? x >= *field.maximum : x > *field.maximum)) {
    bound = (field.below_maximum ? "less than " : "at most ") + show(Literal(*field.maximum));
  }
  if (bound.empty()) return accept(value);
  if (bound.size() > 2 && bound.substr(bound.size() - 2) == ".0") bound.resize(bound.size() - 2);
  CheckResult v = refuse("must be " + bound);
  if (!field.fallback.is_null())
    v.suggestion = "The default is " + show(field.fallback) + ".";
  else if (field.kinds & kInt && field.above_minimum)
    v.suggestion =
        "Set it to at least " + std::to_string(static_cast<int64_t>(*field.minimum) + 1) + ", or leave it out.";
  v.out_of_range = true;
  return v;
}

CheckResult check_choice(const Field& field, const Value& value, const std::vector<Literal>& choices,
                         const std::vector<std::string>* other_names) {
  for (const Literal& choice : choices) {
    if (same(value, choice)) return accept(to_value(choice));
  }
  std::vector<std::string> words;
  std::string all;
  for (const Literal& choice : choices) {
    all += (all.empty() ? "" : ", ") + show(choice);
    const Value word = to_value(choice);
    if (!word.is_string()) continue;
    words.push_back(word);
    if (field.any_case && value.is_string() && lower(words.back()) == lower(value)) return accept(word);
  }
  if (!field.open_choices.empty() && value.is_string()) {
    if (!other_names) return accept(value);
    for (const std::string& name : *other_names) {
      if (name == value.get_ref<const std::string&>()) return accept(value);
    }
    words.insert(words.end(), other_names->begin(), other_names->end());
    all += ", " + field.open_choices;
  }
  CheckResult v = refuse("must be one of " + all);
  if (value.is_string()) {
    const std::string near = nearest(value, words);
    if (near.empty() && !field.other_text_is.empty()) {
      CheckResult read = accept(Value(field.other_text_is));
      read.warning = "is not one of " + all + " and is read as \"" + field.other_text_is + "\".";
      return read;
    }
    if (!near.empty()) v.suggestion = "Did you mean " + show(Value(near)) + "?";
  }
  v.out_of_range = true;
  return v;
}

bool has_whole_value(const Value& value) {
  if (value.is_number_integer()) return true;
  if (!value.is_number_float()) return false;
  const double x = value.get<double>();
  return std::isfinite(x) && std::floor(x) == x && x > -9.2e18 && x < 9.2e18;
}

// The number that pydantic reads from a text for an integer or a float; nothing if it refuses the text.
std::optional<Value> number_of_text(std::string text, unsigned kinds) {
  const char* blanks = " \t\r\n";
  const size_t first = text.find_first_not_of(blanks);
  if (first == std::string::npos) return {};
  text = text.substr(first, text.find_last_not_of(blanks) - first + 1);
  // Digits may be grouped: 1_000_000. An underscore stands between two digits.
  for (size_t at = text.find('_'); at != std::string::npos; at = text.find('_', at)) {
    const auto is_digit = [&](size_t i) {
      return i < text.size() && std::isdigit(static_cast<unsigned char>(text[i]));
    };
    if (at == 0 || !is_digit(at - 1) || !is_digit(at + 1)) return {};
    text.erase(at, 1);
  }
  if (number_in(text).empty() || text.find_first_of("xX") != std::string::npos) return {};
  const size_t digits = text[0] == '-' || text[0] == '+' ? 1 : 0;
  const size_t point = std::min(text.find_first_not_of("0123456789", digits), text.size());
  const bool whole = point > digits && point - digits <= 18 &&
                     (point == text.size() || (!(kinds & kFloat) && text[point] == '.' && point + 1 < text.size() &&
                                               text.find_first_not_of('0', point + 1) == std::string::npos));
  if (whole) return Value(static_cast<int64_t>(std::strtoll(text.c_str(), nullptr, 10)));
  return kinds & kFloat ? std::optional<Value>(std::strtod(text.c_str(), nullptr)) : std::nullopt;
}

CheckResult check_list(const Field& field, const Value& value, bool lenient_texts) {
  Value out = Value::array();
  Field item;
  item.kinds = field.item_kinds;
  if (field.item_count && value.size() != *field.item_count) {
    const std::string advice = field.fallback.is_null() ? "" : "The default is " + show(field.fallback) + ".";
    CheckResult v = refuse("must have " + std::to_string(*field.item_count) + " items", advice);
    v.out_of_range = true;
    return v;
  }
  for (size_t i = 0; i < value.size(); ++i) {
    const std::string at = "item " + std::to_string(i + 1) + " (" + show(value[i], 40) + ") ";
    CheckResult v;
    if (field.item_choices.empty()) {
      item.minimum = field.item_minimum;
      item.maximum = field.item_below;
      item.below_maximum = field.item_below.has_value();
      v = check(item, value[i], lenient_texts, nullptr);
    } else {
      v = value[i].is_string() ? check_choice(field, value[i], field.item_choices, nullptr)
                               : wrong_type(item, value[i]);
    }
    if (!v.value) {
      v.problem = at + v.problem;
      return v;
    }
    if (field.unique_items && contains(out, *v.value)) continue;
    out.push_back(std::move(*v.value));
  }
  return accept(std::move(out));
}

CheckResult check_kind(const Field& field, const Value& value, bool lenient_texts) {
  const unsigned k = field.kinds;
  if (value.is_boolean()) return k & kBool ? accept(value) : wrong_type(field, value);
  if (value.is_number()) {
    if (value.is_number_float() && !std::isfinite(value.get<double>())) {
      if ((k & kInfinity) && value.get<double>() > 0) return accept(value);
      return (k & (kInt | kFloat))
                 ? refuse("must be finite",
                          field.fallback.is_null() ? "" : "The default is " + show(field.fallback) + ".")
                 : wrong_type(field, value);
    }
    if ((k & kInt) && has_whole_value(value)) {
      return accept(value.is_number_float() ? Value(static_cast<int64_t>(value.get<double>())) : value);
    }
    if (k & kFloat) return accept(value);
    if ((k & kBool) && (value == 0 || value == 1)) return accept(value == 1);
    return wrong_type(field, value);
  }
  if (value.is_string()) {
    if (k & kText) return accept(value);
    const std::string small = lower(value);
    const bool yes = small == "true" || small == "1", no = small == "false" || small == "0";
    if (lenient_texts && (k & kBool) && (yes || no)) {
      CheckResult v = accept(yes);
      v.warning = std::string("is a text and is read as ") + (yes ? "true" : "false") + "; write it without quotes.";
      return v;
    }
    if (lenient_texts && (k & (kInt | kFloat))) {
      if (const auto number = number_of_text(value.get<std::string>(), k)) {
        CheckResult v = check_kind(field, *number, false);
        v.warning = "is a text and is read as " + show(*number) + "; write it without quotes.";
        return v;
      }
    }
    if (field.truthy_text && !small.empty()) {
      CheckResult v = accept(!no);
      v.warning = std::string("is a text and is read as ") + (no ? "false" : "true") + "; write it without quotes.";
      return v;
    }
    if ((k & kList) && field.wrap_items == "text") return accept(Value::array({value}));
    return wrong_type(field, value);
  }
  if (value.is_array())
    return !(k & kList)       ? wrong_type(field, value)
           : field.item_kinds ? check_list(field, value, lenient_texts)
                              : accept(value);
  if (value.is_object()) return k & kTable ? accept(value) : wrong_type(field, value);
  if (value.is_binary()) return k & kPython ? accept(value) : wrong_type(field, value);
  return wrong_type(field, value);
}

}  // namespace

CheckResult check(const Field& field, const Value& value, bool lenient_texts,
                  const std::vector<std::string>* other_names) {
  if (field.kinds & kAnything || field.kinds == 0) return accept(value);
  if (value.is_null()) {
    if (field.null_is_default) return accept(to_value(field.fallback));
    if (field.kinds & kNull) return accept(value);
    return refuse("must be " + describe_kinds(field),
                  field.fallback.is_null() ? "" : "Leave the key out to get the default " + show(field.fallback) + ".");
  }
  CheckResult v = check_kind(field, value, lenient_texts);
  if (!v.value) return v;
  const bool chosen = !field.choices.empty() && !v.value->is_binary() &&
                      !(v.value->is_number() && (field.kinds & (kInt | kFloat)) && (field.kinds & kText));
  if (chosen) {
    CheckResult choice = check_choice(field, *v.value, field.choices, other_names);
    if (choice.warning.empty()) choice.warning = v.warning;
    return choice;
  }
  if (v.value->is_number()) {
    CheckResult range = check_range(field, *v.value);
    if (!range.value) return range;
  }
  return v;
}

}  // namespace ds::config
