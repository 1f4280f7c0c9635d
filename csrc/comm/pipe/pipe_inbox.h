// One stream of messages that comes in, for PipeChannel ([Note: ahead] in pipe_channel.h).
//
// [Note: who receives]
// A thread takes messages as they come. Over a ring of notes the caller of take() does it itself when nothing has come
// yet: it is woken by the sender, without the thread in between. While it waits, both copy what is large.
#pragma once
#include <c10/core/Event.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "comm/pipe/note_ring.h"
#include "comm/pipe/pipe_message.h"

namespace ds::comm {

struct PipeChannelOptions;

class PipeInbox {
 public:
  struct Source {
    CommunicatorPtr communicator;
    std::mutex& issuing;  // one call at a time
    int from;
    int place;       // of that rank in the communicator
    int64_t pid;     // of the process whose memory this one reads; 0: none
    NoteRing* ring;  // notes come over it; null: over the communicator, with the tensors behind them
    bool grants;     // the sender waits for a grant before it sends the tensors
    const char* what;
  };

  PipeInbox(Source source, const PipeChannelOptions& options);

  void expect(int64_t messages);
  PipeMessage take();  // waits
  bool arrived();
  // True while something is being received over the communicator: that has to be aborted, too.
  bool end(const std::string& why);
  // After end(), when what it waits for has been aborted. A forked child has no thread to join.
  void join(bool here) {
    if (thread_.joinable()) here ? thread_.join() : thread_.detach();
  }

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Arrived {
    PipeMessage message;
    std::optional<c10::Event> done;  // on asynchronous devices
  };

  // A range that is copied out of the sender's memory, by the first idle thread.
  struct Chunk {
    uint64_t from;
    char* to;
    size_t bytes;
  };
  struct Copying {
    std::vector<Chunk> chunks;
    std::atomic<size_t> next{0}, done{0};
    std::atomic<bool> failed{false};
    bool has_more() const { return next < chunks.size(); }
  };

  void serve();
  bool may_receive() const;
  bool help(Lock& lock);
  void copy_chunks(Copying& copying) const;
  void copy_all(std::vector<Chunk> chunks);
  bool take_next(Lock& lock, NoteRing::Waiter waiter);
  void await(Lock& lock);
  WorkPtr start(const at::Tensor& tensor);
  void receive_bytes(void* data, int64_t size);
  void check(const PipeNote& note);
  void grant();
  Arrived receive();
  PipeMessage receive_now(Lock& lock);
  Arrived read_offered();

  const Source source_;
  const PipeChannelOptions& options_;  // of the channel, which lives longer
  ReceiveBuffers buffers_;             // of who receives
  std::mutex mutex_;                   // of what follows
  std::condition_variable changed_;
  std::deque<Arrived> ready_;
  int64_t expected_ = 0, received_ = 0, taken_ = 0;
  std::string ended_;
  std::shared_ptr<Copying> copying_;  // that others may help with
  bool busy_ = false;                 // somebody receives, or waits for a note: the caller alone
  int64_t granted_ = 0;               // under way, of who receives
  WorkPtr granting_;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace ds::comm
