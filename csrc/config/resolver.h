// From a document to every key's value: defaults filled in, deprecated names forwarded, rules applied. What is wrong
// is collected, not thrown, so that one run tells everything.
#pragma once
#include <string>
#include <unordered_map>
#include <vector>

#include "config/document.h"
#include "config/schema.h"

namespace ds::config {

enum class Source { kDefault, kGiven, kDerived, kDeprecated, kEnvironment, kAuto };

const char* source_name(Source source);  // "default", "given", ...

struct Origin {
  Source source = Source::kDefault;
  int line = 0;        // of the key that gave it; 0 when unknown
  std::string detail;  // the deprecated name, the reason of a derived value, the variable
};

struct Options {
  bool strict_top_level = false;  // DS_STRICT_CONFIG=1
  bool sections_only = false;     // leave out the rules that make sense for a whole configuration only
  std::unordered_map<std::string, std::string> environment;  // variables that are set, by name: Field::environment
  // The texts that Field::or_other() admits, by path: class names of torch.optim, which this room cannot know. A path
  // that is absent admits every text.
  std::unordered_map<std::string, std::vector<std::string>> other_names;
};

class Config {
 public:
  const Value& values() const { return values_; }  // of every key
  const Document& document() const { return document_; }
  const std::vector<Issue>& issues() const { return issues_; }
  Origin origin(const std::string& path) const;  // Source::kDefault for anything not touched
  const std::unordered_map<std::string, Origin>& origins() const { return origins_; }
  int line(const std::string& path) const;           // 0 when unknown
  const Value* find(const std::string& path) const;  // nullptr when there is no such key
  void set(const std::string& path, Value value, Origin origin);
  void add(Issue issue);
  bool broken() const;
  std::string where(const std::string& path) const;  // "zero_optimization.stage (ds.json:12)"
  // All errors as one text; "" when there are none. With `kind`: the one to raise (kAssertion if any is one).
  // `built_only` false: as if every feature were there.
  std::string complaint(ErrorKind* kind = nullptr, bool built_only = true) const;

 private:
  friend class Resolver;
  friend Config resolve(Document, const Schema&, const Options&);
  Document document_;
  Value values_;
  std::unordered_map<std::string, Origin> origins_;
  std::vector<Issue> issues_;
};

// The value of a key; the default of its Field where the section that has it is absent. Fails where there is no such
// key.
Value value_of(const Config& config, const Schema& schema, const std::string& path);
Value default_of(const Field& field);
Value section_defaults(const Field& section);
Config resolve(Document document, const Schema& schema, const Options& options = {});

}  // namespace ds::config
