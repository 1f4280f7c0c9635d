// One stream of messages that goes out, for PipeChannel ([Note: grants] in pipe_channel.h).
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "comm/pipe/pipe_peer.h"

namespace ds::comm {

class PipeOutbox final : public PipeThread {
 public:
  // The tensors of a message whose note has been sent.
  struct Message {
    int64_t number;
    std::vector<at::Tensor> tensors;
    std::optional<c10::Event> ready;  // on asynchronous devices: when the tensors are computed
    std::vector<WorkPtr> works;       // their sends, once `issued`
    bool issued = false;
  };

  PipeOutbox(PipePeer peer, const PipeChannelOptions& options);

  // Its tensors are sent, by the thread, when the receiver has granted this.
  void put(std::shared_ptr<Message> message);
  // Until then; the host waits. ErrorKind::kRuntime after end(), and where no grant comes within the timeout.
  void await_issued(const Message& message);

 private:
  void serve(Lock& lock) override;
  bool interrupt() override { return !waiting_.empty(); }
  void await_grant(int64_t number);

  int64_t granted_ = 0;                           // of the thread; an aborted receive may still write it
  std::deque<std::shared_ptr<Message>> waiting_;  // for their grants; guarded by the mutex
};

}  // namespace ds::comm
