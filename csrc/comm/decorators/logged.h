// A Communicator that says what each call was and how long it took, for the log of operations.
#pragma once
#include "comm/communicator.h"

namespace ds::comm {

// One finished call.
struct LoggedCall {
  const char* op;  // verb_name()
  int64_t bytes;   // of the largest tensor of the call: what all ranks together hold of it, once
  double ms;       // from the call to its end on this rank
};

// Does what `inner` does. While logging is on, every call waits for its end, so that its time is its own: nothing
// overlaps. Barriers, and what run_all() makes one launch, are not logged.
class LoggedCommunicator : public Communicator {
 public:
  explicit LoggedCommunicator(CommunicatorPtr inner) : inner_(std::move(inner)) {}

  void log_calls(bool on) { logging_ = on; }
  std::vector<LoggedCall> take_log();  // calls since the last take

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string name() const override { return inner_->name(); }
  bool carries(const Op&) const override { return true; }
  WorkPtr run_all(const std::vector<Op>& ops) override { return inner_->run_all(ops); }
  PeerMemoryPtr peer_memory(int64_t bytes) override { return inner_->peer_memory(bytes); }
  CommunicatorPtr among(const std::vector<int>& ranks) override { return inner_->among(ranks); }
  void leave() override { inner_->leave(); }
  void abort(const std::string& why) noexcept override { inner_->abort(why); }
  Communicator& bare() override { return inner_->bare(); }

 protected:
  WorkPtr start(const Op& op) override;

 private:
  const CommunicatorPtr inner_;
  bool logging_ = false;
  std::vector<LoggedCall> log_;
};

inline std::shared_ptr<LoggedCommunicator> logged(CommunicatorPtr inner) {
  return std::make_shared<LoggedCommunicator>(std::move(inner));
}

}  // namespace ds::comm
