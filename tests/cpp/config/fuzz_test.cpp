// Random, truncated and hostile texts: whatever comes, a Config or an Error, never anything else, and soon.
// DS_FUZZ_CASES sets how many instead of 100 000: `make test-unit` and the sanitizers run fewer.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <random>

#include "config/render.h"

namespace ds::config {
namespace {

class Generator {
 public:
  explicit Generator(unsigned seed) : random_(seed) { collect(schema(Root::kTraining).root); }

  std::string text() {
    std::string out = object(0);
    const int damage = pick(6);
    if (damage == 0) out.resize(pick(static_cast<int>(out.size()) + 1));  // truncated
    if (damage == 1) {                                                    // bytes turned
      for (int i = 0; i < 4 && !out.empty(); ++i)
        out[pick(static_cast<int>(out.size()))] = static_cast<char>(pick(256));
    }
    if (damage == 2) out.insert(pick(static_cast<int>(out.size()) + 1), std::string(pick(3000), "[{\"/"[pick(4)]));
    return out;
  }

 private:
  int pick(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }

  void collect(const Field& section) {
    for (const Field& f : section.fields) {
      names_.push_back(f.name);
      collect(f);
    }
  }

  std::string key() {
    std::string name = names_[pick(static_cast<int>(names_.size()))];
    if (pick(8) == 0) name[pick(static_cast<int>(name.size()))] = static_cast<char>('a' + pick(26));
    if (pick(30) == 0) name = "";
    if (pick(30) == 0) name += " ";
    return "\"" + name + "\"";
  }

  // Mostly keys of the section itself, so that the walk gets deep.
  std::string object(int depth) { return body(schema(Root::kTraining).root, depth); }

  std::string body(const Field& section, int depth) {
    std::string out = "{";
    const int count = pick(5);
    for (int i = 0; i < count; ++i) {
      const Field* f =
          section.fields.empty() ? nullptr : &section.fields[pick(static_cast<int>(section.fields.size()))];
      if (!f || pick(6) == 0) {
        out += key() + ": " + value(depth + 1);
      } else {
        out += "\"" + f->name + "\": " + (f->is_section() && pick(5) ? body(*f, depth + 1) : value(depth + 1));
      }
      out += i + 1 < count ? "," : "";
    }
    return out + "}";
  }

  std::string value(int depth) {
    static const char* const kValues[] = {"1",
                                          "0",
                                          "-1",
                                          "1e999",
                                          "-1e999",
                                          "5e8",
                                          "1e400",
                                          "0.5",
                                          "NaN",
                                          "Infinity",
                                          "true",
                                          "false",
                                          "null",
                                          "\"auto\"",
                                          "\"cpu\"",
                                          "\"Adam\"",
                                          "\"\"",
                                          "\"WarmupLR\"",
                                          "[]",
                                          "{}",
                                          "[1, 2]",
                                          "[\"a\"]",
                                          "9223372036854775808",
                                          "-9223372036854775808",
                                          "\"\\ud83d\\ude00\"",
                                          "123456789012345678901234567890",
                                          "[null]",
                                          "[{}]",
                                          "2",
                                          "'''x\n  y'''",
                                          "no quotes\n",
                                          "\"3\"",
                                          "3"};
    if (depth < 6 && pick(8) == 0) return object(depth);
    if (depth < 6 && pick(20) == 0) return "[" + value(depth + 1) + "," + value(depth + 1) + "]";
    return kValues[pick(static_cast<int>(std::size(kValues)))];
  }

  std::mt19937 random_;
  std::vector<std::string> names_;
};

TEST(Fuzz, NeverAnythingButAConfigOrAnError) {
  const char* asked = std::getenv("DS_FUZZ_CASES");
  const int cases = asked ? std::atoi(asked) : 100000;
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  std::chrono::duration<double> slowest{0};
  Generator generator(7);
  int read = 0, broken = 0, fine = 0;
  for (int i = 0; i < cases; ++i) {
    const std::string text = generator.text();
    const auto begin = Clock::now();
    try {
      const Document document = read_text(text, "f");
      ++read;
      const Config config = resolve(document, schema(Root::kTraining));
      if (i % 16 == 0) explain(config, schema(Root::kTraining));
      const std::string complaint = config.complaint();
      ASSERT_EQ(config.broken(), !complaint.empty());
      ++(config.broken() ? broken : fine);
      ASSERT_TRUE(config.values().contains("zero_optimization"));
      ASSERT_EQ(config.values()["zero_optimization"].size(),
                schema(Root::kTraining).root.find("zero_optimization")->fields.size());
    } catch (const Error& e) {
      ASSERT_EQ(e.kind(), ErrorKind::kConfig) << e.what();
      ASSERT_EQ(std::string(e.what()).substr(0, 2), "f:");
    }
    slowest = std::max<std::chrono::duration<double>>(slowest, Clock::now() - begin);
  }
  // A case takes about 80 us; these bounds hold on a busy machine and under a sanitizer, and no hang passes them.
  EXPECT_LT(slowest.count(), 2.0);
  EXPECT_LT(std::chrono::duration<double>(Clock::now() - start).count(), 5.0 + 1e-3 * cases);
  // The cases reach everything: texts that cannot be read, wrong configurations, good ones.
  EXPECT_GT(cases - read, cases / 20);
  EXPECT_GT(broken, cases / 10);
  EXPECT_GT(fine, cases / 50);
}

TEST(Fuzz, AnyValueForAnyKeyKeepsTheTypeOfTheKey) {
  const Value values[] = {nullptr,
                          true,
                          1,
                          -1,
                          0.5,
                          1e300,
                          "x",
                          "auto",
                          Value::array(),
                          Value::array({1}),
                          Value::object(),
                          Value::object({{"a", 1}}),
                          python_value("<x>", 0),
                          std::numeric_limits<double>::quiet_NaN()};
  for (const Field& field : schema(Root::kTraining).root.fields) {
    for (const Value& value : values) {
      const Config config = resolve(from_value(Value::object({{field.name, value}}), "f"), schema(Root::kTraining));
      const Value* now = config.find(field.name);
      ASSERT_NE(now, nullptr);
      if (field.is_section() && !field.null_when_absent) {
        EXPECT_TRUE(now->is_object()) << field.name << " " << show(value);
      }
    }
  }
}

}  // namespace
}  // namespace ds::config
