// A Communicator that says what each call was and how long it took, for the log of operations.
#pragma once
#include "comm/decorators/forwarding.h"

namespace ds::comm {

// One finished call.
struct LoggedCall {
  const char* op;  // verb_name()
  int64_t bytes;   // of the largest tensor of the call: what all ranks together hold of it, once
  double ms;       // from the call to its end on this rank
};

// Does what `inner` does. While logging is on, every call waits for its end, so that its time is its own: nothing
// overlaps. Barriers, and what run_all() makes one launch, are not logged.
class LoggedCommunicator : public ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;

  void log_calls(bool on) { logging_ = on; }
  std::vector<LoggedCall> take_log();  // calls since the last take

 protected:
  WorkPtr start(const Op& op) override;

 private:
  bool logging_ = false;
  std::vector<LoggedCall> log_;
};

inline std::shared_ptr<LoggedCommunicator> logged(CommunicatorPtr inner) {
  return std::make_shared<LoggedCommunicator>(std::move(inner));
}

}  // namespace ds::comm
