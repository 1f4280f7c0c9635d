#include "config/value.h"

#include <cmath>

namespace ds::config {

namespace {

struct ToValue {
  Value operator()(std::nullptr_t) const { return nullptr; }
  Value operator()(EmptyTable) const { return Value::object(); }
  template <typename T>
  Value operator()(const T& v) const {
    return v;
  }
};

std::string quoted(const std::string& text) {
  return Value(text).dump(-1, ' ', false, Value::error_handler_t::replace);
}

void write(const Value& v, std::string& out, size_t limit) {
  if (out.size() > limit) return;
  switch (v.type()) {
    case Value::value_t::object: {
      out += '{';
      bool first = true;
      for (const auto& item : v.items()) {
        if (out.size() > limit) return;
        out += (first ? "" : ", ") + quoted(item.key()) + ": ";
        first = false;
        write(item.value(), out, limit);
      }
      out += '}';
      return;
    }
    case Value::value_t::array: {
      out += '[';
      for (size_t i = 0; i < v.size(); ++i) {
        if (out.size() > limit) return;
        if (i) out += ", ";
        write(v[i], out, limit);
      }
      out += ']';
      return;
    }
    case Value::value_t::binary: out.append(v.get_binary().begin(), v.get_binary().end()); return;
    case Value::value_t::string: out += quoted(v.get_ref<const std::string&>()); return;
    case Value::value_t::number_float: {
      const double x = v.get<double>();
      out += std::isnan(x) ? "NaN" : std::isinf(x) ? (x > 0 ? "Infinity" : "-Infinity") : v.dump();
      return;
    }
    default: out += v.dump(-1, ' ', false, Value::error_handler_t::replace);
  }
}

}  // namespace

Value to_value(const Literal& literal) { return std::visit(ToValue{}, literal.value); }

bool same(const Value& value, const Literal& literal) {
  const Value other = to_value(literal);
  if (value.is_boolean() != other.is_boolean()) return false;
  return value == other;
}

std::string show(const Value& value, size_t limit) {
  std::string out;
  write(value, out, limit);
  if (out.size() <= limit) return out;
  size_t end = limit;
  while (end > 0 && (static_cast<unsigned char>(out[end]) & 0xC0) == 0x80) --end;  // not inside a UTF-8 character
  return out.substr(0, end) + "...";
}

std::string show(const Literal& literal) { return show(to_value(literal), 400); }

Value scalar_in(const std::string& text) {
  Value value = Value::parse(text, nullptr, false);
  return value.is_number() || value.is_boolean() || value.is_null() ? value : Value(text);
}

Value python_value(const std::string& repr, uint64_t index) {
  return Value::binary(std::vector<uint8_t>(repr.begin(), repr.end()), index);
}

uint64_t python_index(const Value& value) { return value.get_binary().subtype(); }

}  // namespace ds::config
