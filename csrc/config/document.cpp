#include "config/document.h"

#include <cctype>

#include "config/literal.h"
#include "config/text.h"

namespace ds::config {

namespace {

std::string stripped(const std::string& key) { return std::string(trimmed(key)); }

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
    if (peek() != '{' && !starts_member()) error("a configuration is one object and starts with '{'");
    doc_.root = peek() == '{' ? value(1) : object(1, /*braces=*/false);
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

  [[noreturn]] void error_at_end(const std::string& what) const {
    error(what + (greedy_line_ == 0 ? ""
                                    : ". On line " + std::to_string(greedy_line_) + " the text without quotes " +
                                          show(Value(greedy_text_), 40) +
                                          " goes on to the end of its line, brackets and commas included; put texts in "
                                          "double quotes"));
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

  // Whether a file without outer braces starts here: a key and a colon on one line.
  bool starts_member() const {
    const size_t end = text_.find_first_of(":\n", at_);
    return end != std::string_view::npos && end > at_ && text_[end] == ':' && !is_punctuation(peek());
  }

  static bool is_punctuation(char c) { return std::string_view("{}[],:").find(c) != std::string_view::npos; }

  Value value(int depth) {
    const char c = peek();
    if (c == '{' || c == '[') {
      if (depth > kMaxDepth) error("nested deeper than " + std::to_string(kMaxDepth) + " levels");
      return c == '{' ? object(depth) : array(depth);
    }
    if (c == '\'' && peek(1) == '\'' && peek(2) == '\'') return several_lines();
    if (c == '"' || c == '\'') return quoted();
    return without_quotes();
  }

  Value object(int depth, bool braces = true) {
    std::vector<std::pair<std::string, Value>> members;
    std::unordered_map<std::string, int> seen;
    if (braces) ++at_;
    skip();
    while (braces ? peek() != '}' : !done()) {
      if (done()) error_at_end("the file ends inside an object: a '}' is missing");
      const int line = line_;
      const std::string raw = peek() == '"' || peek() == '\'' ? quoted() : bare();
      const std::string key = stripped(raw);
      skip();
      if (peek() != ':') error("expected ':' after the key " + show(Value(key)));
      ++at_;
      skip();
      if (done()) error_at_end("the file ends before the value of " + show(Value(key)));

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
      if (!braces && skip_to_end()) break;
      separator(braces ? '}' : '\0', "object");
    }
    if (braces) ++at_;
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
      if (done()) error_at_end("the file ends inside a list: a ']' is missing");
      const size_t outer = path_.size();
      path_ += '[' + std::to_string(out.size()) + ']';
      out.push_back(value(depth + 1));
      path_.resize(outer);
      separator(']', "list");
    }
    ++at_;
    return out;
  }

  bool skip_to_end() {
    const size_t start = at_;
    const int line = line_;
    skip();
    if (done()) return true;
    at_ = start;
    line_ = line;
    return false;
  }

  void separator(char close, const char* what) {
    const bool new_line = skip();
    if (peek() == ',') {
      ++at_;
      skip();
      if (peek() == ',') error("two commas in a row");
    } else if (peek() != close && !(new_line && !done())) {
      if (done())
        error_at_end(std::string("the file ends inside a") + (close == '}' ? "n " : " ") + what + ": a '" + close +
                     "' is missing");
      error(close == '\0' ? "expected ',' or a new line" : std::string("expected ',' or '") + close + "'");
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

  std::string bare() {
    const size_t start = at_;
    while (!done() && !is_punctuation(peek()) && std::string_view(" \t\r\n\"'#").find(peek()) == std::string_view::npos)
      ++at_;
    if (at_ == start) error("expected a key, found '" + std::string(1, peek()) + "'");
    return std::string(text_.substr(start, at_ - start));
  }

  // A number, a constant, or else a text that goes on to the end of the line.
  Value without_quotes() {
    if (is_punctuation(peek())) error("expected a value, found '" + std::string(1, peek()) + "'");
    const std::string_view line = text_.substr(at_, text_.find('\n', at_) - at_);  // npos - at_: to the end
    size_t end = line.find_first_of(",]}#/");
    while (end < line.size() && line[end] == '/' &&
           (end + 1 == line.size() || (line[end + 1] != '/' && line[end + 1] != '*')))
      end = line.find_first_of(",]}#/", end + 1);
    const std::string_view word = trimmed(line.substr(0, end));
    if (auto constant = constant_in(word)) {
      at_ += word.size();
      return *std::move(constant);
    }
    const std::string_view text = trimmed(line);
    if (greedy_line_ == 0 && text.find_first_of(",]}") != std::string_view::npos) {
      greedy_line_ = line_;
      greedy_text_ = text;
    }
    if (text.back() == ',') {
      doc_.issues.push_back({Severity::kWarning,
                             ErrorKind::kConfig,
                             "comma_in_text",
                             {path_},
                             path_ + " = " + show(Value(std::string(text))) + " (line " + std::to_string(line_) +
                                 ") ends with a comma: a text without quotes goes on to the end of its line.",
                             "Put the text in double quotes, or leave the comma out."});
    }
    at_ += line.size();
    return std::string(text);
  }

  // '''...''': the lines as they are, without the indentation of the opening quotes, the blanks and the line break
  // after them and the line break before the closing ones.
  std::string several_lines() {
    const size_t start = at_;
    const int line = line_;
    const size_t before = at_ == 0 ? std::string_view::npos : text_.rfind('\n', at_ - 1);
    size_t indent = 0;  // characters, not bytes
    for (size_t i = before == std::string_view::npos ? 0 : before + 1; i < at_; ++i)
      indent += (static_cast<unsigned char>(text_[i]) & 0xC0) != 0x80;
    const auto is_blank = [&] { return peek() == ' ' || peek() == '\t' || peek() == '\r'; };
    const auto next_line = [&] {
      ++line_;
      ++at_;
      for (size_t i = 0; i < indent && is_blank(); ++i) ++at_;
    };
    at_ += 3;
    while (is_blank()) ++at_;
    if (peek() == '\n') next_line();
    std::string out;
    while (!done()) {
      if (peek() == '\'' && peek(1) == '\'' && peek(2) == '\'') {
        at_ += 3;
        if (!out.empty() && out.back() == '\n') out.pop_back();
        return out;
      }
      if (peek() == '\n') {
        out += '\n';
        next_line();
        continue;
      }
      if (peek() != '\r') out += peek();
      ++at_;
    }
    at_ = start;
    line_ = line;
    error("the text that starts here has no closing '''");
  }

  std::string_view text_;
  Document& doc_;
  size_t at_ = 0;
  int line_ = 1;
  int greedy_line_ = 0;  // of the first text without quotes that took in a bracket or a comma; 0: there is none
  std::string greedy_text_;
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
