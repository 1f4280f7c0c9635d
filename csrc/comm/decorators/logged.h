// A Communicator whose calls are written into the log of the process.
#pragma once
#include <c10/core/Device.h>

#include "comm/decorators/call_log.h"
#include "comm/decorators/forwarding.h"

namespace ds::comm {

// The host waits until the device has done the work that was asked of it so far: a work's wait() only orders streams.
void finish_device(c10::Device device);

// Does what `inner` does. While `log` is on, every call waits for its end. Barriers, and calls that run_all() makes one
// launch, are not logged.
class LoggedCommunicator : public ForwardingCommunicator {
 public:
  LoggedCommunicator(CommunicatorPtr inner, CallLogPtr log)
      : ForwardingCommunicator(std::move(inner)), log_(std::move(log)) {}
  const CommunicatorPtr& inner() const { return inner_; }

 protected:
  WorkPtr start(const Op& op) override;

 private:
  const CallLogPtr log_;
};

// `inner` itself without a log. A communicator that is logged already is logged once.
CommunicatorPtr logged(CommunicatorPtr inner, CallLogPtr log);

}  // namespace ds::comm
