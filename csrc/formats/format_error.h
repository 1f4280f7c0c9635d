// The errors that readers throw for a file with wrong contents. Each kind has an exception of its own in Python.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace ds::formats {

// Pickle: the structure of a file of torch.save. Bindings make pickle.UnpicklingError of it.
class DamagedPickle : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A pickle names something that is neither a tensor nor plain data. `name` is what, in full.
class RefusedName : public DamagedPickle {
 public:
  explicit RefusedName(std::string name) : DamagedPickle(name), name_(std::move(name)) {}
  const std::string& name() const { return name_; }

 private:
  std::string name_;
};

// The archive around it: zipfile.BadZipFile.
class DamagedZip : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// deepspeed's DamagedSafetensors, a ValueError.
class DamagedSafetensors : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// deepspeed's DamagedIndex, a ValueError: the index of an indexed data set.
class DamagedIndex : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// damaged<DamagedZip>(path, ": too short"): joins its arguments as a stream would.
template <typename Error, typename... Args>
[[noreturn]] void damaged(const Args&... args) {
  std::ostringstream text;
  (text << ... << args);
  throw Error(text.str());
}

}  // namespace ds::formats
