// A collective that has been issued.
#pragma once
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace ds::comm {

class Work {
 public:
  virtual ~Work() = default;
  virtual void wait() = 0;                // idempotent; throws what the collective threw
  virtual bool ready() { return false; }  // true: wait() will not block the host; false: unknown
  // True: wait() will not make a stream wait, either. False: unknown. Work on a stream does not ask the device, whose
  // answers differ between runs.
  virtual bool ended() { return ready(); }
};
using WorkPtr = std::shared_ptr<Work>;

class DoneWork : public Work {
 public:
  void wait() override {}
  bool ready() override { return true; }
};

// Ends when all of `parts` have ended; then wait() does what is left to do on this rank.
class JoinedWork : public Work {
 public:
  explicit JoinedWork(std::vector<WorkPtr> parts, std::function<void()> finish = nullptr)
      : parts_(std::move(parts)), finish_(std::move(finish)) {}

  void wait() override {
    const auto parts = std::exchange(parts_, {});
    const auto finish = std::exchange(finish_, nullptr);
    for (const WorkPtr& part : parts) part->wait();
    if (finish) finish();
  }
  bool ready() override {
    for (const WorkPtr& part : parts_)
      if (!part->ready()) return false;
    return true;
  }
  bool ended() override {
    for (const WorkPtr& part : parts_)
      if (!part->ended()) return false;
    return true;
  }

 private:
  std::vector<WorkPtr> parts_;
  std::function<void()> finish_;
};

}  // namespace ds::comm
