// A condition variable whose owner may end in a forked child.
#pragma once
#include <condition_variable>
#include <memory>
#include <utility>

#include "base/process.h"

namespace ds {

// The destructor of a std::condition_variable waits until all threads that wait for it have left. In a forked child
// these are threads of the parent, which never leave, so the child keeps the memory instead.
class ConditionVariable {
 public:
  ~ConditionVariable() {
    if (!owner_.here()) (void)made_.release();
  }

  template <typename... Given>
  void wait(Given&&... given) {
    made_->wait(std::forward<Given>(given)...);
  }
  template <typename... Given>
  auto wait_for(Given&&... given) {
    return made_->wait_for(std::forward<Given>(given)...);
  }
  template <typename... Given>
  auto wait_until(Given&&... given) {
    return made_->wait_until(std::forward<Given>(given)...);
  }
  void notify_one() { made_->notify_one(); }
  void notify_all() { made_->notify_all(); }

 private:
  std::unique_ptr<std::condition_variable> made_ = std::make_unique<std::condition_variable>();
  const OwningProcess owner_;
};

}  // namespace ds
