// The one exception type of the C++ core. Bindings turn `kind` into the Python exception users expect.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace ds {

enum class ErrorKind {
  kConfig,          // DeepSpeedConfigError: a key, its value and the fix belong in the message
  kValue,           // ValueError
  kType,            // TypeError
  kKey,             // KeyError
  kIndex,           // IndexError
  kAssertion,       // AssertionError: the contract promises one for some config checks
  kNotImplemented,  // NotImplementedError
  kRuntime,         // RuntimeError
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

// fail(ErrorKind::kValue, "lr must be positive, got ", lr): joins its arguments as a stream would.
template <typename... Args>
[[noreturn]] void fail(ErrorKind kind, const Args&... args) {
  std::ostringstream text;
  (text << ... << args);
  throw Error(kind, text.str());
}

}  // namespace ds
