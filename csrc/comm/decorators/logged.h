// A Communicator whose calls are written into the log of the process.
#pragma once
#include <c10/core/Device.h>

#include <atomic>
#include <string>

#include "comm/decorators/call_log.h"
#include "comm/decorators/forwarding.h"

namespace ds::comm {

// Whether work of the device goes on when a call has returned. That of the host does not, and tensors of the device
// meta have no work.
bool asynchronous(c10::Device device);
// The host waits until the device has done the work that was asked of it so far: a work's wait() only orders streams.
void finish_device(c10::Device device);

// Does what `inner` does. While a listener of `log` wants that, every call but barriers and those of run_all() waits
// for its end; barriers are not recorded. `group`: LoggedCall::group.
class LoggedCommunicator : public ForwardingCommunicator {
 public:
  LoggedCommunicator(CommunicatorPtr inner, CallLogPtr log, std::string group)
      : ForwardingCommunicator(std::move(inner)), log_(std::move(log)), group_(std::move(group)) {}
  const CommunicatorPtr& inner() const { return inner_; }
  const std::string& group() const { return group_; }
  WorkPtr run_all(const std::vector<Op>& ops) override;

 protected:
  WorkPtr start(const Op& op) override;

 private:
  LoggedCall record_of(const Op& op, int64_t number, double begin) const;

  const CallLogPtr log_;
  const std::string group_;
  std::atomic<int64_t> collectives_{0};
};

// `inner` itself without a log. A communicator that is logged already is logged once.
CommunicatorPtr logged(CommunicatorPtr inner, CallLogPtr log, std::string group = {});

}  // namespace ds::comm
