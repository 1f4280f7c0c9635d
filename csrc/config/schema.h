// All keys: chapters (one per file of sections/) register themselves and are put in order here.
//
//   DS_CONFIG_CHAPTER(30, kTraining, "Precision") {
//     c.add(validated("fp16", "...", { boolean("enabled", false, "..."), ... }));
//     c.rule("fp16 and bf16 exclude each other", [](RuleContext& j) { if (...) j.error(...); });
//   }
//
// The schema is built once, on first use, and never changes.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "config/field.h"

namespace ds::config {

enum class Root { kTraining, kInference, kRaggedInference };

// The input of a cross-section rule: resolved values by dotted path, defaults filled in. A key that was refused reads
// as its default.
class RuleContext {
 public:
  virtual ~RuleContext() = default;
  virtual bool given(const std::string& path) const = 0;    // by the user, in any spelling, and not null or "auto"
  virtual bool refused(const std::string& path) const = 0;  // given, and in error
  virtual bool is_null(const std::string& path) const = 0;
  virtual bool is_bare_bool(const std::string& key) const = 0;  // a section of the top level given as true or false
  virtual bool on(const std::string& path) const = 0;           // a true boolean; false for anything else
  virtual int64_t integer(const std::string& path) const = 0;   // 0 for anything but a number
  virtual double number(const std::string& path) const = 0;
  virtual std::string text(const std::string& path) const = 0;               // "" for anything but a text
  virtual size_t size(const std::string& path) const = 0;                    // items of a list or keys of an object
  virtual std::vector<std::string> keys(const std::string& path) const = 0;  // of an object
  virtual std::vector<std::string> given_keys(const std::string& path) const = 0;  // those that the user wrote

  // `paths`: the keys that cause it, the one to change first.
  virtual void error(const std::vector<std::string>& paths, const std::string& what, const std::string& fix,
                     ErrorKind kind = ErrorKind::kConfig) = 0;
  virtual void warn(const std::vector<std::string>& paths, const std::string& what) = 0;
  // An empty `why`: the value counts as the default.
  virtual void derive(const std::string& path, const Literal& value, const std::string& why) = 0;
};

struct Rule {
  std::string doc;
  std::function<void(RuleContext&)> check;
  bool whole_only = false;  // not checked for a section object that is made by itself
};

// The combined result of several keys, for `ds_config explain`: lines under a title.
struct Consequence {
  std::string title;
  std::function<std::vector<std::string>(const RuleContext&)> tell;
};

struct ChapterHead {
  std::string title;
  size_t first_field, field_count;
};

struct Schema {
  Field root;  // a nameless section
  std::vector<ChapterHead> chapters;
  std::vector<Rule> rules;
  std::vector<Consequence> consequences;
  std::vector<std::pair<std::string, std::string>> environment;  // path and variable of keys that have one
  std::vector<std::string> private_keys;                         // unknown keys that known clients add: never an error
  std::vector<std::string> own_words;  // unknown keys that resemble a known one and are still words of their own
  bool lenient_top = false;                                      // unknown top-level keys are warnings
};

class Chapter {
 public:
  explicit Chapter(Schema& schema) : schema_(schema) {}
  void add(Field field) { schema_.root.fields.push_back(std::move(field)); }
  void rule(std::string doc, std::function<void(RuleContext&)> check) {
    schema_.rules.push_back({std::move(doc), std::move(check), false});
  }
  void whole_rule(std::string doc, std::function<void(RuleContext&)> check) {
    schema_.rules.push_back({std::move(doc), std::move(check), true});
  }
  void consequence(std::string title, std::function<std::vector<std::string>(const RuleContext&)> tell) {
    schema_.consequences.push_back({std::move(title), std::move(tell)});
  }
  void private_key(std::string name) { schema_.private_keys.push_back(std::move(name)); }
  void own_word(std::string name) { schema_.own_words.push_back(std::move(name)); }

 private:
  Schema& schema_;
};

const Schema& schema(Root root);

using ChapterDefinition = void (*)(Chapter&);
struct ChapterRegistration {
  ChapterRegistration(int order, Root root, const char* title, ChapterDefinition define);
};

}  // namespace ds::config

// A file may hold several, and several files may be compiled as one: __COUNTER__ keeps their names apart.
#define DS_CONFIG_CHAPTER(order, root, title) DS_CONFIG_CHAPTER_OF(order, root, title, __COUNTER__)
#define DS_CONFIG_CHAPTER_OF(order, root, title, id) DS_CONFIG_CHAPTER_NAMED(order, root, title, id)
#define DS_CONFIG_CHAPTER_NAMED(order, root, title, id)                                                            \
  static void define_chapter_##id(::ds::config::Chapter& c);                                                       \
  static const ::ds::config::ChapterRegistration chapter_registration_##id{order, ::ds::config::Root::root, title, \
                                                                           &define_chapter_##id};                  \
  static void define_chapter_##id([[maybe_unused]] ::ds::config::Chapter& c)
