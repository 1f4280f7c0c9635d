#include "formats/pickle_names.h"

#include <map>
#include <utility>

#include "base/ranges.h"
#include "formats/format_error.h"
#include "formats/plain_rules.h"

namespace ds::formats {
namespace {

using Path = std::pair<std::string_view, std::string_view>;

struct Table {
  Table() {
    for (std::vector<Rule> part : {plain_rules(), tensor_rules()}) append(rules, part);
    for (size_t i = 0; i < rules.size(); ++i) by_path.emplace(Path{rules[i].module, rules[i].name}, i);
  }
  std::vector<Rule> rules;
  std::map<Path, size_t> by_path;
};

const Table& table() {
  static const Table made;
  return made;
}

}  // namespace

const Rule& rule_at(uint16_t index) { return table().rules[index]; }

void modernise(std::string* module, std::string* name) {
  static const std::map<Path, Path> kNames = {
      {{"__builtin__", "unicode"}, {"builtins", "str"}},
      {{"__builtin__", "long"}, {"builtins", "int"}},
      {{"__builtin__", "xrange"}, {"builtins", "range"}},
      {{"copy_reg", "_reconstructor"}, {"copyreg", "_reconstructor"}},
      {{"pathlib._local", "PosixPath"}, {"pathlib", "PosixPath"}},
      {{"pathlib._local", "PurePosixPath"}, {"pathlib", "PurePosixPath"}},
      {{"pathlib._local", "WindowsPath"}, {"pathlib", "WindowsPath"}},
      {{"pathlib._local", "PureWindowsPath"}, {"pathlib", "PureWindowsPath"}},
  };
  const auto found = kNames.find({*module, *name});
  if (found != kNames.end()) {
    const Path modern = found->second;
    *module = modern.first;
    *name = modern.second;
  } else if (*module == "__builtin__") {
    *module = "builtins";
  }
}

bool NameResolver::in_table(const std::string& module, const std::string& name, Global* found) {
  found->module = module;
  found->name = name;
  const auto row = table().by_path.find({module, name});
  if (row != table().by_path.end()) {
    found->use = NameUse::kRule;
    found->rule = static_cast<uint16_t>(row->second);
    return true;
  }
  if (module == "torch" || module == "torch.storage" || module == "torch.cuda") {
    found->element = element_by_storage(name);
    if (found->element != nullptr && (name != "_UntypedStorage" || module == "torch.storage")) {
      found->use = NameUse::kStorage;
      return true;
    }
  }
  return false;
}

Global NameResolver::find(const std::string& module, const std::string& name) {
  Global found;
  if (in_table(module, name, &found)) return found;
  if (module == "torch" && element_by_dtype(name) != nullptr) return found;
  throw RefusedName(found.full());
}

}  // namespace ds::formats
