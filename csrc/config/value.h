// The JSON value of this room, and how it is shown in messages.
//
// A Python-only value travels as `binary`: the bytes are its repr for messages, the subtype is its index in the list
// that the bindings keep.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

#include "config/field.h"

namespace ds::config {

using Value = nlohmann::ordered_json;

Value to_value(const Literal& literal);
bool same(const Value& value, const Literal& literal);    // 1 and 1.0 are the same; true and 1 are not
std::string show(const Value& value, size_t limit = 80);  // as JSON; never throws, cut to `limit` characters
std::string show(const Literal& literal);
Value scalar_in(const std::string& text);  // a number, true, false or null as in JSON; anything else is the text itself
Value python_value(const std::string& repr, uint64_t index);
uint64_t python_index(const Value& value);

}  // namespace ds::config
