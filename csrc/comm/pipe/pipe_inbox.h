// One stream of messages that comes in, for PipeChannel ([Note: ahead] in pipe_channel.h).
//
// [Note: threads]
// A thread takes messages as they come. Over a ring of notes the caller of take() receives the message itself when none
// has come yet: the sender wakes it without the thread in between. The caller and the thread copy large tensors
// together.
#pragma once
#include <c10/core/Event.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "comm/pipe/note_ring.h"
#include "comm/pipe/pipe_message.h"
#include "comm/pipe/pipe_peer.h"

namespace ds::comm {

class PipeInbox final : public PipeThread {
 public:
  struct Source {
    int64_t pid;     // of the process whose memory this one reads; 0: none
    NoteRing* ring;  // notes come over it; null: over the communicator, with the tensors behind them
    bool grants;     // the sender waits for a grant before it sends the tensors
  };

  PipeInbox(PipePeer peer, Source source, const PipeChannelOptions& options);

  void expect(int64_t messages);
  PipeMessage take();  // waits
  bool arrived();

 private:
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

  void serve(Lock& lock) override;
  bool interrupt() override;
  bool may_receive() const;
  bool help(Lock& lock);
  void copy_chunks(Copying& copying) const;
  void copy_all(std::vector<Chunk> chunks);
  bool take_next(Lock& lock, NoteRing::Waiter waiter);
  void await(Lock& lock);
  void receive_bytes(void* data, int64_t size);
  void check(const PipeNote& note);
  void grant();
  Arrived receive();
  PipeMessage receive_now(Lock& lock);
  Arrived read_offered();

  const Source source_;
  // The mutex guards these.
  std::deque<Arrived> ready_;
  int64_t expected_ = 0, received_ = 0, taken_ = 0;
  std::shared_ptr<Copying> copying_;  // that others may help with
  bool busy_ = false;                 // a thread receives a message, or the caller waits for a note
  // The thread that has set `busy_` uses these.
  ReceiveBuffers buffers_;
  int64_t granted_ = 0;  // the last grant, which may be on its way
  WorkPtr granting_;
};

}  // namespace ds::comm
