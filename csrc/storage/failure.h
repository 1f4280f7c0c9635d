// The error of a background thread, which every caller that asks for it gets thrown.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "base/error.h"
#include "io/file_error.h"

namespace ds::storage {

struct Failure {
  std::string text;
  int code = 0;  // of a FileError, with what follows; 0: of something else
  std::string path;
  uint64_t offset = 0, bytes = 0;

  [[noreturn]] void raise(const std::string& more = "") const {
    if (code != 0) throw io::FileError(code, path, text + more, offset, bytes);
    fail(ErrorKind::kRuntime, text, more);
  }
};
using FailurePtr = std::shared_ptr<const Failure>;

// Returns the failure of the exception that is being handled.
inline FailurePtr caught() {
  try {
    throw;
  } catch (const io::FileError& e) {
    return std::make_shared<const Failure>(Failure{e.what(), e.code(), e.path(), e.offset(), e.bytes()});
  } catch (const std::exception& e) {
    return std::make_shared<const Failure>(Failure{e.what(), 0, "", 0, 0});
  } catch (...) {
    return std::make_shared<const Failure>(
        Failure{"a transfer failed with something that is not an exception", 0, "", 0, 0});
  }
}

}  // namespace ds::storage
