// The base class of decorators: all but start() is that of the inner Communicator, under the same rank, size and name.
#pragma once
#include "base/clock.h"
#include "comm/communicator.h"

namespace ds::comm {

// Passes everything on to `inner`; a decorator overrides start(), which sees every call but those of run_all().
class ForwardingCommunicator : public Communicator {
 public:
  explicit ForwardingCommunicator(CommunicatorPtr inner) : inner_(std::move(inner)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string name() const override { return inner_->name(); }
  bool carries(const Op&) const override { return true; }
  bool groups() const override { return inner_->groups(); }
  WorkPtr run_all(const std::vector<Op>& ops) override { return inner_->run_all(ops); }
  PeerMemoryPtr peer_memory(int64_t bytes) override { return inner_->peer_memory(bytes); }
  CommunicatorPtr among(const std::vector<int>& ranks) override { return inner_->among(ranks); }
  bool reaches(const c10::Device& device) const override { return inner_->reaches(device); }
  bool carries_host_memory() const override { return inner_->carries_host_memory(); }
  void leave() override { inner_->leave(); }
  void set_timeout(milliseconds timeout) override { inner_->set_timeout(timeout); }
  void abort(const std::string& why) noexcept override { inner_->abort(why); }
  Communicator& bare() override { return inner_->bare(); }

 protected:
  bool carries_parts() const override { return true; }
  const CommunicatorPtr inner_;
};

}  // namespace ds::comm
