#include "config/literal.h"

#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>

namespace ds::config {

std::string_view trimmed(std::string_view text) {
  const char* blanks = " \t\r\n";
  const size_t first = text.find_first_not_of(blanks);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(blanks) - first + 1);
}

std::optional<Value> constant_in(std::string_view word) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (word == "true" || word == "True") return Value(true);
  if (word == "false" || word == "False") return Value(false);
  if (word == "null" || word == "None") return Value(nullptr);
  if (word == "NaN" || word == "nan") return Value(std::numeric_limits<double>::quiet_NaN());
  const bool minus = !word.empty() && word.front() == '-';
  const std::string_view body = word.substr(minus || (!word.empty() && word.front() == '+'));
  if (body == "Infinity" || body == "inf") return Value(minus ? -kInfinity : kInfinity);
  // from_chars also reads names of infinity, and a sign after ours.
  if (body.empty() || !(body.front() == '.' || std::isdigit(static_cast<unsigned char>(body.front())))) return {};
  if (body.find_first_not_of("0123456789") == std::string_view::npos) {
    int64_t whole = 0;
    const std::string_view with_sign = minus ? word : body;
    const auto [end, code] = std::from_chars(with_sign.data(), with_sign.data() + with_sign.size(), whole);
    if (code == std::errc() && end == with_sign.data() + with_sign.size()) return Value(whole);
  }
  double x = 0;
  const auto [end, code] = std::from_chars(body.data(), body.data() + body.size(), x);
  if (end != body.data() + body.size() || code == std::errc::invalid_argument) return {};
  // Too large or too small for a double: from_chars leaves x alone, strtod gives infinity or zero.
  if (code == std::errc::result_out_of_range) x = std::strtod(std::string(body).c_str(), nullptr);
  return Value(minus ? -x : x);
}

}  // namespace ds::config
