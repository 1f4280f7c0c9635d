#include "config/document.h"

#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "config/text.h"

namespace ds::config {

namespace {

std::string stripped(const std::string& key) {
  const char* blanks = " \t\r\n";
  const size_t first = key.find_first_not_of(blanks);
  if (first == std::string::npos) return "";
  return key.substr(first, key.find_last_not_of(blanks) - first + 1);
}

void warn_blanks(Document& doc, const std::string& path, const std::string& key) {
  doc.issues.push_back({Severity::kWarning,
                        ErrorKind::kConfig,
                        "blank_in_key",
                        {path},
                        "The key " + show(Value(key)) + " has blanks around it; it is read as \"" + path + "\".",
                        ""});
}

class Reader {
 public:
  Reader(std::string_view text, Document& doc) : text_(text), doc_(doc) {}

  void read() {
    check_utf8();
    if (text_.substr(0, 3) == "\xEF\xBB\xBF") at_ = 3;  // byte order mark
    skip();
    if (done()) error("the file is empty; a configuration is an object, at least {}");
    if (peek() != '{') error("a configuration is one object and starts with '{'");
    doc_.root = value(1);
    skip();
    if (!done()) error("text after the end of the configuration");
  }

 private:
  bool done() const { return at_ >= text_.size(); }
  char peek(size_t ahead = 0) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0'; }

  [[noreturn]] void error(const std::string& what) const {
    size_t line_start = at_ == 0 ? std::string_view::npos : text_.rfind('\n', std::min(at_, text_.size()) - 1);
    line_start = line_start == std::string_view::npos ? 0 : line_start + 1;
    fail(ErrorKind::kConfig, doc_.source, ":", line_, ":", at_ - line_start + 1, ": ", what, ".");
  }

  void check_utf8() {
    for (size_t i = 0; i < text_.size();) {
      const auto byte = static_cast<unsigned char>(text_[i]);
      if (byte == '\n') ++line_;
      const int more = byte < 0x80                   ? 0
                       : byte >= 0xC2 && byte < 0xE0 ? 1
                       : byte >= 0xE0 && byte < 0xF0 ? 2
                       : byte >= 0xF0 && byte < 0xF5 ? 3
                                                     : -1;
      bool good = more >= 0;
      for (int k = 1; good && k <= more; ++k) {
        good = i + k < text_.size() && (static_cast<unsigned char>(text_[i + k]) & 0xC0) == 0x80;
      }
      if (good && more >= 2) {  // overlong forms, surrogates, beyond U+10FFFF
        const auto next = static_cast<unsigned char>(text_[i + 1]);
        good = !(byte == 0xE0 && next < 0xA0) && !(byte == 0xED && next > 0x9F) && !(byte == 0xF0 && next < 0x90) &&
               !(byte == 0xF4 && next > 0x8F);
      }
      if (!good) {
        at_ = i;
        error("this is not UTF-8 text; save the file as UTF-8");
      }
      i += more + 1;
    }
    line_ = 1;
  }

  // Blanks and comments. Returns true when a line ended in between.
  bool skip() {
    const int line = line_;
    while (!done()) {
      const char c = peek();
      if (c == '\n') {
        ++line_;
        ++at_;
      } else if (c == ' ' || c == '\t' || c == '\r') {
        ++at_;
      } else if (c == '#' || (c == '/' && peek(1) == '/')) {
        while (!done() && peek() != '\n') ++at_;
      } else if (c == '/' && peek(1) == '*') {
        const size_t end = text_.find("*/", at_ + 2);
        if (end == std::string_view::npos) error("the comment that starts here has no */");
        for (; at_ < end + 2; ++at_) line_ += text_[at_] == '\n';
      } else {
        break;
      }
    }
    return line_ != line;
  }

  Value value(int depth) {
    const char c = peek();
    if (c == '{' || c == '[') {
      if (depth > kMaxDepth) error("nested deeper than " + std::to_string(kMaxDepth) + " levels");
      return c == '{' ? object(depth) : array(depth);
    }
    if (c == '"' || c == '\'') return quoted();
    if (c == '-' || c == '+' || c == '.' || std::isdigit(static_cast<unsigned char>(c))) return number();
    return word();
  }

  Value object(int depth) {
    std::vector<std::pair<std::string, Value>> members;
    std::unordered_map<std::string, int> seen;
    ++at_;
    skip();
    while (peek() != '}') {
      if (done()) error("the file ends inside an object: a '}' is missing");
      const int line = line_;
      const std::string raw = peek() == '"' || peek() == '\'' ? quoted() : bare("a key in quotes");
      const std::string key = stripped(raw);
      skip();
      if (peek() != ':') error("expected ':' after the key " + show(Value(key)));
      ++at_;
      skip();
      if (done()) error("the file ends before the value of " + show(Value(key)));

      const size_t outer = path_.size();
      if (outer) path_ += '.';
      path_ += key;
      if (key != raw) warn_blanks(doc_, path_, raw);
      const auto [first, is_new] = seen.emplace(key, line);
      if (is_new) doc_.lines.emplace(path_, line);
      Value item = value(depth + 1);
      if (!is_new) {
        doc_.issues.push_back({Severity::kError,
                               ErrorKind::kConfig,
                               "duplicate_key",
                               {path_},
                               "\"" + path_ + "\" is given twice, on line " + std::to_string(first->second) +
                                   " and on line " + std::to_string(line) + ".",
                               "Keep one of them."});
      } else {
        members.emplace_back(key, std::move(item));
      }
      path_.resize(outer);
      separator('}', "object");
    }
    ++at_;
    // An object of the library has constant keys, so it copies all that is in it whenever it grows.
    Value::object_t out;
    out.reserve(members.size());
    for (auto& [key, item] : members) out.emplace_back(std::move(key), std::move(item));
    return Value(std::move(out));
  }

  Value array(int depth) {
    Value out = Value::array();
    ++at_;
    skip();
    while (peek() != ']') {
      if (done()) error("the file ends inside a list: a ']' is missing");
      const size_t outer = path_.size();
      path_ += '[' + std::to_string(out.size()) + ']';
      out.push_back(value(depth + 1));
      path_.resize(outer);
      separator(']', "list");
    }
    ++at_;
    return out;
  }

  void separator(char close, const char* what) {
    const bool new_line = skip();
    if (peek() == ',') {
      ++at_;
      skip();
      if (peek() == ',') error("two commas in a row");
    } else if (peek() != close && !(new_line && !done())) {
      if (done())
        error(std::string("the file ends inside a") + (close == '}' ? "n " : " ") + what + ": a '" + close +
              "' is missing");
      error(std::string("expected ',' or '") + close + "'");
    }
  }

  std::string quoted() {
    const char quote = peek();
    const int line = line_;
    const size_t start = at_++;
    std::string out;
    while (true) {
      if (done() || peek() == '\n') {
        at_ = start;
        line_ = line;
        error("the text that starts here has no closing quote");
      }
      const char c = text_[at_++];
      if (c == quote) return out;
      if (c != '\\') {
        out += c;
        continue;
      }
      const char e = peek();
      ++at_;
      switch (e) {
        case 'n': out += '\n'; break;
        case 't': out += '\t'; break;
        case 'r': out += '\r'; break;
        case 'b': out += '\b'; break;
        case 'f': out += '\f'; break;
        case '"':
        case '\'':
        case '\\':
        case '/': out += e; break;
        case 'u': append_utf8(out, code_point()); break;
        default: --at_; error("unknown escape in a text; write \\\\ for a backslash");
      }
    }
  }

  unsigned hex4() {
    unsigned v = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      const char c = peek();
      if (!std::isxdigit(static_cast<unsigned char>(c))) error("\\u takes four hexadecimal digits");
      v = v * 16 + (c <= '9' ? c - '0' : (c | 32) - 'a' + 10);
    }
    return v;
  }

  unsigned code_point() {
    const unsigned high = hex4();
    if (high < 0xD800 || high > 0xDFFF) return high;
    if (high > 0xDBFF || peek() != '\\' || peek(1) != 'u') error("half of a surrogate pair");
    at_ += 2;
    const unsigned low = hex4();
    if (low < 0xDC00 || low > 0xDFFF) error("half of a surrogate pair");
    return 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00);
  }

  static void append_utf8(std::string& out, unsigned c) {
    if (c < 0x80) {
      out += static_cast<char>(c);
    } else if (c < 0x800) {
      out += static_cast<char>(0xC0 | c >> 6);
      out += static_cast<char>(0x80 | (c & 63));
    } else if (c < 0x10000) {
      out += static_cast<char>(0xE0 | c >> 12);
      out += static_cast<char>(0x80 | (c >> 6 & 63));
      out += static_cast<char>(0x80 | (c & 63));
    } else {
      out += static_cast<char>(0xF0 | c >> 18);
      out += static_cast<char>(0x80 | (c >> 12 & 63));
      out += static_cast<char>(0x80 | (c >> 6 & 63));
      out += static_cast<char>(0x80 | (c & 63));
    }
  }

  std::string bare(const char* expected) {
    const size_t start = at_;
    while (std::isalnum(static_cast<unsigned char>(peek())) || peek() == '_' || peek() == '-') ++at_;
    if (at_ == start) error(std::string("expected ") + expected + ", found '" + std::string(1, peek()) + "'");
    return std::string(text_.substr(start, at_ - start));
  }

  Value word() {
    const size_t start = at_;
    const std::string name = bare("a value");
    if (name == "true" || name == "True") return true;
    if (name == "false" || name == "False") return false;
    if (name == "null" || name == "None") return nullptr;
    if (name == "NaN" || name == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (name == "Infinity" || name == "inf") return std::numeric_limits<double>::infinity();
    at_ = start;
    error("unknown word " + show(Value(name)) + "; put texts in double quotes");
  }

  Value number() {
    const size_t start = at_;
    const bool minus = peek() == '-';
    if (minus || peek() == '+') ++at_;
    if (peek() == 'I' || peek() == 'i') {
      const Value v = word();
      if (!v.is_number_float()) error("expected a number");
      return minus ? Value(-v.get<double>()) : v;
    }
    const size_t digits = at_;
    bool integral = true;
    while (std::isalnum(static_cast<unsigned char>(peek())) || peek() == '.' ||
           ((peek() == '-' || peek() == '+') && (text_[at_ - 1] == 'e' || text_[at_ - 1] == 'E'))) {
      integral = integral && std::isdigit(static_cast<unsigned char>(peek()));
      ++at_;
    }
    const std::string_view body = text_.substr(digits, at_ - digits);
    if (integral) {
      int64_t whole = 0;
      const std::string_view signed_body = minus ? text_.substr(start, at_ - start) : body;
      const auto [end, code] = std::from_chars(signed_body.data(), signed_body.data() + signed_body.size(), whole);
      if (code == std::errc() && end == signed_body.data() + signed_body.size()) return whole;
    }
    double x = 0;
    const auto [end, code] = std::from_chars(body.data(), body.data() + body.size(), x);
    if (end != body.data() + body.size() || code == std::errc::invalid_argument) {
      at_ = start;
      error("this is not a number");
    }
    // Too large or too small for a double: from_chars leaves x alone, strtod gives infinity or zero.
    if (code == std::errc::result_out_of_range) x = std::strtod(std::string(body).c_str(), nullptr);
    return minus ? -x : x;
  }

  std::string_view text_;
  Document& doc_;
  size_t at_ = 0;
  int line_ = 1;
  std::string path_;
};

void strip_keys(Value& value, const std::string& path, Document& doc) {
  if (value.is_array()) {
    for (size_t i = 0; i < value.size(); ++i) strip_keys(value[i], path + "[" + std::to_string(i) + "]", doc);
    return;
  }
  if (!value.is_object()) return;
  bool clean = true;
  for (auto& item : value.items()) {
    const std::string key = stripped(item.key());
    clean = clean && key == item.key();
    strip_keys(item.value(), join_path(path, key), doc);
  }
  if (clean) return;
  Value out = Value::object();
  for (auto& item : value.items()) {
    const std::string key = stripped(item.key());
    const std::string here = join_path(path, key);
    if (key != item.key()) warn_blanks(doc, here, item.key());
    if (out.contains(key)) {
      doc.issues.push_back({Severity::kError,
                            ErrorKind::kConfig,
                            "duplicate_key",
                            {here},
                            "\"" + here + "\" is given twice, once with blanks around it.",
                            "Keep one of them."});
    } else {
      out.push_back({key, item.value()});
    }
  }
  value = std::move(out);
}

}  // namespace

Document read_text(std::string_view text, const std::string& source) {
  Document doc;
  doc.source = source;
  Reader(text, doc).read();
  return doc;
}

Document from_value(Value root, const std::string& source) {
  Document doc;
  doc.source = source;
  doc.root = std::move(root);
  if (!doc.root.is_object()) fail(ErrorKind::kConfig, source, ": a configuration is an object, not ", show(doc.root));
  strip_keys(doc.root, "", doc);
  return doc;
}

}  // namespace ds::config
