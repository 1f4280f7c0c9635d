#include "config/schema.h"

#include <set>

#include "base/ranges.h"

namespace ds::config {

namespace {

struct Registered {
  int order;
  Root root;
  const char* title;
  ChapterDefinition define;
};

// Filled while the library is loaded, read-only afterwards.
std::vector<Registered>& chapters() {
  static std::vector<Registered> all;
  return all;
}

void check_names(const Field& field, const std::string& path) {
  std::set<std::string> seen;
  for (const Field& f : field.fields) {
    std::vector<std::string> names = f.aliases;
    names.push_back(f.name);
    for (const std::string& name : names) {
      if (!seen.insert(name).second) fail(ErrorKind::kRuntime, "two Fields are named ", path, name);
    }
    if (f.doc.empty()) fail(ErrorKind::kRuntime, "the Field ", path, f.name, " has no doc line");
    check_names(f, path + f.name + ".");
  }
}

void find_environment(const Field& section, const std::string& path, Schema& out) {
  for (const Field& f : section.fields) {
    if (!f.environment.empty()) out.environment.emplace_back(path + f.name, f.environment);
    find_environment(f, path + f.name + ".", out);
  }
}

Schema build(Root root) {
  std::vector<Registered> mine;
  for (const Registered& chapter : chapters()) {
    if (chapter.root == root) mine.push_back(chapter);
  }
  sort(mine, [](const Registered& a, const Registered& b) { return a.order < b.order; });
  Schema out;
  out.root = section("", "the configuration", {});
  out.root.validated = root != Root::kTraining;
  out.lenient_top = root == Root::kTraining;
  for (const Registered& chapter : mine) {
    const size_t first = out.root.fields.size();
    Chapter c(out);
    chapter.define(c);
    out.chapters.push_back({chapter.title, first, out.root.fields.size() - first});
  }
  check_names(out.root, "");
  find_environment(out.root, "", out);
  return out;
}

}  // namespace

ChapterRegistration::ChapterRegistration(int order, Root root, const char* title, ChapterDefinition define) {
  chapters().push_back({order, root, title, define});
}

const Schema& schema(Root root) {
  static const Schema training = build(Root::kTraining);
  static const Schema inference = build(Root::kInference);
  static const Schema ragged = build(Root::kRaggedInference);
  return root == Root::kTraining ? training : root == Root::kInference ? inference : ragged;
}

}  // namespace ds::config
