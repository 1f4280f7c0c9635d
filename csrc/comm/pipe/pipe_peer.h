// The part that PipeInbox and PipeOutbox share: calls to the other rank of a stream of messages, and the thread.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

#include "base/condition_variable.h"
#include "comm/communicator.h"

namespace ds::comm {

struct PipeChannelOptions;

// The communicator of a stream to or from another rank: one of the two over all ranks, or that of an edge.
struct PipeRoute {
  CommunicatorPtr communicator;
  std::mutex issuing;  // one call at a time
};

// The other rank of a stream.
struct PipePeer {
  PipeRoute& route;
  int stage;         // in the pipeline
  int place;         // in the communicator
  const char* what;  // the messages, in errors

  WorkPtr send(const at::Tensor& tensor) const;
  WorkPtr recv(const at::Tensor& tensor) const;
  // A grant is the number of a message, which lives until the call has ended. The log of calls does not have grants, so
  // plans need not know of them.
  WorkPtr send_grant(int64_t& number) const;
  WorkPtr recv_grant(int64_t& number) const;
};

// The thread of a stream. An error in it ends the stream, as end() does.
class PipeThread {
 public:
  // Ends the thread and all waits with this text; the first one counts. True: a call over the communicator is on its
  // way, so the communicator has to be aborted, too.
  bool end(const std::string& why);
  // After end(), when the communicator has been aborted. A forked child has no thread to join.
  void join(bool here) {
    if (thread_.joinable()) here ? thread_.join() : thread_.detach();
  }

 protected:
  using Lock = std::unique_lock<std::mutex>;

  PipeThread(PipePeer peer, const PipeChannelOptions& options) : peer_(peer), options_(options) {}
  virtual ~PipeThread() = default;

  void start();  // at the end of a constructor
  // The body of the thread. It gets the mutex locked, and returns when `ended_` is set.
  virtual void serve(Lock& lock) = 0;
  // Called by end() with the mutex held: wakes waits that `changed_` does not wake, and returns what end() returns.
  virtual bool interrupt() = 0;

  const PipePeer peer_;
  const PipeChannelOptions& options_;  // of the channel, which lives longer
  std::mutex mutex_;                   // guards `ended_`, and members of the derived classes
  ConditionVariable changed_;
  std::string ended_;  // the reason; empty while it runs

 private:
  std::thread thread_;
};

}  // namespace ds::comm
