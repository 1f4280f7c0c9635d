// One thing to tell the user about one configuration.
#pragma once
#include <string>
#include <vector>

#include "base/error.h"

namespace ds::config {

enum class Severity { kError, kWarning, kNote };

// The code of an error about an "auto" that a trainer (transformers, accelerate) replaces before the engine is made.
constexpr char kLeftToTrainer[] = "left_to_trainer";

struct Issue {
  Severity severity = Severity::kError;
  ErrorKind kind = ErrorKind::kConfig;
  std::string code;                // stable word for tests and tools: "unknown_key", "not_built", ...
  std::vector<std::string> paths;  // the keys that cause it; the first is the one to change
  std::string text;                // names key, value and what is allowed
  std::string suggestion;          // the text to write instead; may be empty
  std::string full() const { return suggestion.empty() ? text : text + " " + suggestion; }
};

}  // namespace ds::config
