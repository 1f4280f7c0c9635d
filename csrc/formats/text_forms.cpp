#include "formats/text_forms.h"

#include <charconv>
#include <limits>
#include <system_error>

namespace ds::formats {
namespace {

// The character at `at`, which moves behind it; -1 for what is no UTF-8.
int32_t next_character(std::string_view bytes, size_t* at, bool surrogates) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(bytes[i]); };
  const uint8_t first = byte(*at);
  if (first < 0x80) {
    ++*at;
    return first;
  }
  const int more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : first >= 0xC2 ? 1 : 0;
  if (more == 0 || first > 0xF4 || *at + more >= bytes.size()) return -1;
  int32_t found = first & (0x3F >> more);
  for (int i = 1; i <= more; ++i) {
    if ((byte(*at + i) & 0xC0) != 0x80) return -1;
    found = found << 6 | (byte(*at + i) & 0x3F);
  }
  if ((more == 2 && found < 0x800) || (more == 3 && (found < 0x10000 || found > 0x10FFFF))) return -1;
  if (found >= 0xD800 && found < 0xE000 && !surrogates) return -1;
  *at += more + 1;
  return found;
}

void put_character(uint32_t value, std::string* out) {
  if (value < 0x80) {
    out->push_back(static_cast<char>(value));
    return;
  }
  const int more = value < 0x800 ? 1 : value < 0x10000 ? 2 : 3;
  out->push_back(static_cast<char>("\x00\xC0\xE0\xF0"[more] | static_cast<int>(value >> (6 * more))));
  for (int i = more - 1; i >= 0; --i) out->push_back(static_cast<char>(0x80 | (value >> (6 * i) & 0x3F)));
}

bool hexadecimal(std::string_view text, uint32_t* value) {
  const auto read = std::from_chars(text.data(), text.data() + text.size(), *value, 16);
  return read.ec == std::errc() && read.ptr == text.data() + text.size();
}

std::string_view stripped(std::string_view text) {
  const auto blank = [](char c) { return c == ' ' || (c >= '\t' && c <= '\r'); };
  while (!text.empty() && blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && blank(text.back())) text.remove_suffix(1);
  return text;
}

}  // namespace

bool is_utf8(std::string_view bytes, bool surrogates) {
  for (size_t at = 0; at < bytes.size();) {
    if (next_character(bytes, &at, surrogates) < 0) return false;
  }
  return true;
}

bool latin1_of(std::string_view utf8, std::string* bytes) {
  for (size_t at = 0; at < utf8.size();) {
    const int32_t found = next_character(utf8, &at, true);
    if (found < 0 || found > 0xFF) return false;
    bytes->push_back(static_cast<char>(found));
  }
  return true;
}

bool raw_unicode_of(std::string_view line, std::string* utf8) {
  for (size_t at = 0; at < line.size();) {
    size_t slashes = 0;
    while (at + slashes < line.size() && line[at + slashes] == '\\') ++slashes;
    const char kind = at + slashes < line.size() ? line[at + slashes] : 0;
    if (slashes % 2 == 1 && (kind == 'u' || kind == 'U')) {
      const size_t digits = kind == 'u' ? 4 : 8, start = at + slashes + 1;
      uint32_t value = 0;
      if (start + digits > line.size() || !hexadecimal(line.substr(start, digits), &value) || value > 0x10FFFF)
        return false;
      utf8->append(slashes - 1, '\\');
      put_character(value, utf8);
      at = start + digits;
    } else if (slashes > 0) {
      utf8->append(slashes, '\\');
      at += slashes;
    } else {
      put_character(static_cast<uint8_t>(line[at++]), utf8);
    }
  }
  return true;
}

bool unquoted(std::string_view line, std::string* bytes) {
  if (line.size() < 2 || line.front() != line.back() || (line.front() != '\'' && line.front() != '"')) return false;
  line = line.substr(1, line.size() - 2);
  static constexpr std::string_view kShort = "\\'\"abfnrtv", kMeant = "\\'\"\a\b\f\n\r\t\v";
  for (size_t at = 0; at < line.size();) {
    if (line[at] != '\\') {
      bytes->push_back(line[at++]);
      continue;
    }
    if (++at == line.size()) return false;
    const size_t known = kShort.find(line[at]);
    uint32_t value = 0;
    if (known != std::string_view::npos) {
      bytes->push_back(kMeant[known]);
      ++at;
    } else if (line[at] == 'x') {
      if (at + 3 > line.size() || !hexadecimal(line.substr(at + 1, 2), &value)) return false;
      bytes->push_back(static_cast<char>(value));
      at += 3;
    } else if (line[at] >= '0' && line[at] <= '7') {
      for (int i = 0; i < 3 && at < line.size() && line[at] >= '0' && line[at] <= '7'; ++i)
        value = value * 8 + static_cast<uint32_t>(line[at++] - '0');
      bytes->push_back(static_cast<char>(value));
    } else if (line[at] != '\n') {
      bytes->push_back('\\');
      bytes->push_back(line[at++]);
    } else {
      ++at;
    }
  }
  return true;
}

bool decimal(std::string_view text, bool* fits, int64_t* value) {
  text = stripped(text);
  if (!text.empty() && text.front() == '+') text.remove_prefix(1);
  const std::string_view digits = !text.empty() && text.front() == '-' ? text.substr(1) : text;
  if (digits.empty() || digits.find_first_not_of("0123456789") != std::string_view::npos) return false;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), *value);
  *fits = read.ec == std::errc();
  return true;
}

bool floating(std::string_view text, double* value) {
  text = stripped(text);
  if (!text.empty() && text.front() == '+') text.remove_prefix(1);
  const auto read = std::from_chars(text.data(), text.data() + text.size(), *value);
  if (read.ptr != text.data() + text.size() || text.empty()) return false;
  if (read.ec == std::errc::result_out_of_range) {  // as float() does: too large is infinite, too small is zero
    const bool small = text.find("e-") != std::string_view::npos || text.find("E-") != std::string_view::npos;
    *value = small ? 0.0 : std::numeric_limits<double>::infinity();
    if (text.front() == '-') *value = -*value;
    return true;
  }
  return read.ec == std::errc();
}

}  // namespace ds::formats
