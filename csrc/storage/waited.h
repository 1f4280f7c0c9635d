// Adds the time of its own life to a number of seconds.
#pragma once
#include <chrono>

namespace ds::storage {

class Waited {
 public:
  explicit Waited(double& seconds) : seconds_(seconds) {}
  ~Waited() { seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }
  Waited(const Waited&) = delete;
  Waited& operator=(const Waited&) = delete;

 private:
  double& seconds_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace ds::storage
