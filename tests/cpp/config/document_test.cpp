#include "config/document.h"

#include <gtest/gtest.h>

#include <cmath>

#include "../error_of.h"

namespace ds::config {
namespace {

std::string refusal(const std::string& text) {
  return error_of(ErrorKind::kConfig, [&] { read_text(text, "f"); });
}

TEST(Document, ReadsEveryKindOfValue) {
  const Value v =
      read_text(R"({"a": [1, -2.5, true, false, null, "x\n\u00e9\ud83d\ude00"], "b": {"c": {}}})", "f").root;
  EXPECT_EQ(v["a"][0], 1);
  EXPECT_EQ(v["a"][1], -2.5);
  EXPECT_EQ(v["a"][2], true);
  EXPECT_TRUE(v["a"][4].is_null());
  EXPECT_EQ(v["a"][5], "x\n\xC3\xA9\xF0\x9F\x98\x80");
  EXPECT_TRUE(v["b"]["c"].is_object());
}

TEST(Document, Numbers) {
  const Value v = read_text(
                      "{a: 9223372036854775807, b: -9223372036854775808, c: 9223372036854775808, d: 1e999, e: -1e999, "
                      "f: NaN, g: Infinity, h: -Infinity, i: 5e8, j: +3, k: 1e-999}",
                      "f")
                      .root;
  EXPECT_EQ(v["a"], std::numeric_limits<int64_t>::max());
  EXPECT_EQ(v["b"], std::numeric_limits<int64_t>::min());
  EXPECT_TRUE(v["c"].is_number_float());
  EXPECT_TRUE(std::isinf(v["d"].get<double>()) && v["d"].get<double>() > 0);
  EXPECT_TRUE(std::isinf(v["e"].get<double>()) && v["e"].get<double>() < 0);
  EXPECT_TRUE(std::isnan(v["f"].get<double>()));
  EXPECT_TRUE(std::isinf(v["g"].get<double>()));
  EXPECT_LT(v["h"].get<double>(), 0);
  EXPECT_EQ(v["i"], 5e8);
  EXPECT_EQ(v["j"], 3);
  EXPECT_EQ(v["k"], 0.0);
}

TEST(Document, Liberties) {
  const Document doc = read_text("\xEF\xBB\xBF{ // one\n a: 1 # two\n 'b': 2, /* three\n */ \"c\": [1, 2,],\n}\n", "f");
  EXPECT_EQ(doc.root.size(), 3u);
  EXPECT_EQ(doc.lines.at("a"), 2);
  EXPECT_EQ(doc.lines.at("b"), 3);
  EXPECT_EQ(doc.lines.at("c"), 4);
}

TEST(Document, TextsWithoutQuotesGoOnToTheEndOfTheLine) {
  const Document doc = read_text(
      "{\n type: AdamW\n path: /data/my files/x, y # no comment\n list: [\n  one two\n  3\n  true story\n ]\n"
      " n: 5e8 # five\n t: true, u: null // end\n v: -.5 /* c */, w: 1\n x: 7a\n}",
      "f");
  const Value& v = doc.root;
  EXPECT_EQ(v["type"], "AdamW");
  EXPECT_EQ(v["path"], "/data/my files/x, y # no comment");
  EXPECT_EQ(v["list"], Value::array({"one two", 3, "true story"}));
  EXPECT_EQ(v["n"], 5e8);
  EXPECT_EQ(v["t"], true);
  EXPECT_TRUE(v["u"].is_null());
  EXPECT_EQ(v["x"], "7a");
  EXPECT_EQ(doc.lines.at("x"), 12);
}

TEST(Document, WithoutOuterBraces) {
  const Document doc = read_text("# mine\ntrain_batch_size: 8\nfp16: {enabled: true}, steps_per_print: 2\n\n", "f");
  EXPECT_EQ(doc.root, read_text("{train_batch_size: 8, fp16: {enabled: true}, steps_per_print: 2}", "f").root);
  EXPECT_EQ(doc.lines.at("fp16.enabled"), 3);
  EXPECT_EQ(refusal("a: 1\nb: 2}\n").substr(0, 6), "f:2:5:");
  EXPECT_EQ(refusal("a: {\nb: 2\n").substr(0, 6), "f:3:1:");
}

TEST(Document, TextsOfSeveralLines) {
  const Value v = read_text(
                      "{\n  a: '''\n     one\n       two \"quoted\" \\n\n\n     end\n     '''\n  b: '''x''', c: ''\n"
                      "  d: ''' y\r\n     z'''\n}",
                      "f")
                      .root;
  EXPECT_EQ(v["a"], "one\n  two \"quoted\" \\n\n\nend");
  EXPECT_EQ(v["b"], "x");
  EXPECT_EQ(v["c"], "");
  EXPECT_EQ(v["d"], "y\nz");
  const std::string open = refusal("{\n a: '''x\n b: 1}\n");
  EXPECT_EQ(open.substr(0, 6), "f:2:5:");
  EXPECT_TRUE(says(open, "no closing '''"));
}

TEST(Document, ATextWithoutQuotesThatTookInTooMuchIsNamed) {
  const std::string text = refusal("{\"fp16\":\n {\"enabled\": tru}}\n");
  EXPECT_EQ(text.substr(0, 6), "f:3:1:");
  EXPECT_TRUE(says(text, "On line 2 the text without quotes \"tru}}\" goes on"));
  const Document doc = read_text("{a: b,\n c: d\n}", "f");
  ASSERT_EQ(doc.issues.size(), 1u);
  EXPECT_EQ(doc.issues[0].code, "comma_in_text");
  EXPECT_EQ(doc.issues[0].severity, Severity::kWarning);
  EXPECT_TRUE(says(doc.issues[0].text, "a = \"b,\" (line 1)"));
}

TEST(Document, LinesOfNestedKeys) {
  const Document doc = read_text("{\"a\": {\n\"b\":\n1}, \"l\": [\n{\"x\": 1}]}", "f");
  EXPECT_EQ(doc.lines.at("a"), 1);
  EXPECT_EQ(doc.lines.at("a.b"), 2);
  EXPECT_EQ(doc.lines.at("l[0].x"), 4);
}

TEST(Document, DuplicatesAreToldWithBothLines) {
  const Document doc = read_text("{\"a\": 1,\n\"b\": {\"a\": 1},\n\" a\": 2}", "f");
  ASSERT_EQ(doc.issues.size(), 2u);  // the blank, then the duplicate
  EXPECT_EQ(doc.issues[0].code, "blank_in_key");
  EXPECT_EQ(doc.issues[1].code, "duplicate_key");
  EXPECT_TRUE(says(doc.issues[1].text, "on line 1 and on line 3"));
  EXPECT_EQ(doc.root["a"], 1);
}

TEST(Document, ErrorsNameLineAndColumn) {
  EXPECT_EQ(refusal("{\n \"a\" 1}").substr(0, 6), "f:2:6:");
  EXPECT_EQ(refusal("{\"a\": \"x\n\"}").substr(0, 6), "f:1:7:");
  for (const char* text : {"",
                           "  ",
                           "1",
                           "[",
                           "{",
                           "{\"a\"",
                           "{\"a\":",
                           "{\"a\":1",
                           "{\"a\":1,",
                           "{\"a\":[",
                           "{\"a\":[1",
                           "{,}",
                           "{\"a\":1,,\"b\":2}",
                           "{\"a\":tru}",
                           "{\"a\":-}",
                           "{\"a\":1.}x",
                           "{\"a\":0x10}",
                           "{\"a\":\"\\u12\"}",
                           "{\"a\":\"\\ud800\"}",
                           "{/*",
                           "{\"a\":1 \"b\":2}",
                           "\xff",
                           "{\"\xc0\x80\":1}",
                           "{\"a\":\"\xed\xa0\x80\"}"}) {
    EXPECT_EQ(refusal(text).substr(0, 2), "f:") << text;
  }
}

TEST(Document, DepthIsLimited) {
  const auto nested = [](int depth, char open, char close) {
    return "{\"a\":" + std::string(depth - 1, open) + std::string(depth - 1, close) + "}";
  };
  EXPECT_NO_THROW(read_text(nested(kMaxDepth, '[', ']'), "f"));
  EXPECT_TRUE(says(refusal(nested(kMaxDepth + 1, '[', ']')), "nested deeper"));
  EXPECT_NE(refusal("{\"a\":" + std::string(1000000, '[')).find("nested deeper"), std::string::npos);
}

TEST(Document, ShowCutsBetweenCharacters) {
  EXPECT_EQ(show(Value("\xC3\xA9\xC3\xA9\xC3\xA9"), 4), "\"\xC3\xA9...");
  EXPECT_EQ(show(Value(std::nan(""))), "NaN");
  EXPECT_EQ(show(python_value("<group>", 3)), "<group>");
  EXPECT_NO_THROW(show(Value("\xff")));
}

}  // namespace
}  // namespace ds::config
