// One stream of messages that goes out, for PipeChannel ([Note: grants] in pipe_channel.h).
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"

namespace ds::comm {

struct PipeChannelOptions;

class PipeOutbox {
 public:
  struct Target {
    CommunicatorPtr communicator;
    std::mutex& issuing;  // one call at a time
    int to;
    int place;  // of that rank in the communicator
    const char* what;
  };
  // The tensors of a message whose note has been sent.
  struct Message {
    int64_t number;
    std::vector<at::Tensor> tensors;
    std::optional<c10::Event> ready;  // on asynchronous devices: when the tensors are computed
    std::vector<WorkPtr> works;       // their sends, once `issued`
    bool issued = false;
  };

  PipeOutbox(Target target, const PipeChannelOptions& options);

  // Its tensors are sent, by the thread, when the receiver has granted this.
  void put(std::shared_ptr<Message> message);
  // Until then; the host waits. ErrorKind::kRuntime after end(), and where no grant comes within the timeout.
  void await_issued(const Message& message);
  // True while a grant is being waited for: the communicator has to be aborted, too.
  bool end(const std::string& why);
  // After end(), when the communicator has been aborted. A forked child has no thread to join.
  void join(bool here) {
    if (thread_.joinable()) here ? thread_.join() : thread_.detach();
  }

 private:
  void serve();
  void await_grant(int64_t number);

  const Target target_;
  const PipeChannelOptions& options_;  // of the channel, which lives longer
  int64_t granted_ = 0;                // of the thread; an aborted receive may still write it
  std::mutex mutex_;                   // of what follows
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Message>> waiting_;
  std::string ended_;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace ds::comm
