// Sends and receives between the stages of a pipeline, over the communicators of its ranks.
//
// [Note: streams of messages]
// One rank sends two streams to another, activations and gradients. Each keeps its order, and neither waits for the
// other. There is a communicator for each of the two. Where sends and receives of a communicator share one queue
// (one_queue.h), two stages that both send first would wait for each other for ever. There, each edge of the plan, a
// stream from one rank to another, has a communicator of these two ranks, in which all goes one way. All ranks open
// theirs in the order of the edges when the channel opens, because other orders can wait in a circle.
//
// [Note: ahead]
// Receives are posted before they are asked for: each stream that comes in here has a thread, which takes messages off
// the wire as soon as they come, as far as expect() says that they will, and at most `ahead` before recv() has taken
// them. Sends return at once; where `bound` messages of a stream are still on their way, the next one waits for the
// oldest: on asynchronous devices the host does, and what is computed there goes on. There, the thread works on a
// stream of its own, and recv() puts the current one behind it: the host waits until the sender's host has sent, never
// for the device. A thread posts the receives of a message when its note has come, so it never puts a receive before a
// send of this rank on which it depends. With `ahead` 0 there is no thread, and recv() itself receives.
//
// [Note: grants]
// Growing the memory of a device may wait for all operations that run there, as cudaMalloc may, and a send runs until
// its receive does. If two stages sent to each other first, and then allocated what they receive, both would wait for
// ever. Over the communicators of edges the receiver therefore allocates the tensors of a message when its note has
// come, then sends a grant (the number of the message), and then posts the receives. Notes and grants travel over the
// host. The sender's thread issues the sends when the grant has come, so no operation waits for an allocation.
// Notes that travel on the device (PipeChannelOptions::note_device) have no grants: their own receives would run there.
//
// [Note: memory of the sender]
// Between processes of one host that may read each other's memory nothing goes over the communicator: the sender writes
// a note into memory that the receiver has made (note_ring.h), the receiver copies the tensors from where the sender
// has them, and says so. Whether all of that may be is tried when a channel opens.
//
// [Note: failure]
// The next recv() throws the error of a thread; abort() ends every wait here, with its text.
#pragma once
#include <c10/core/Stream.h>
#include <c10/util/Optional.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "base/clock.h"
#include "base/process.h"
#include "comm/communicator.h"
#include "comm/pipe/note_ring.h"
#include "comm/pipe/pipe_inbox.h"
#include "comm/pipe/pipe_message.h"
#include "comm/pipe/pipe_outbox.h"
#include "comm/pipe/pipe_peer.h"
#include "plan/pipe_plan.h"

namespace ds::comm {

enum class PipeStream : uint8_t { kActivations, kGrads };

struct PipeChannelOptions {
  c10::Device device = at::kCPU;                   // of received tensors
  c10::Device note_device = at::kCPU;              // of notes
  int bound = 2;                                   // messages of a stream that are on their way
  int ahead = 2;                                   // messages of a stream that have come and have not been asked for
  bool direct = true;                              // messages are read out of the sender's memory, where they can be
  milliseconds timeout{std::chrono::minutes(30)};  // of a message that does not come, or is not taken
};

// A stream from one rank to another.
struct PipeEdge {
  PipeStream stream;
  int from, to;
  bool operator<(const PipeEdge& other) const {
    return std::tie(stream, from, to) < std::tie(other.stream, other.from, other.to);
  }
};
// On asynchronous devices: the calling thread gets a stream of its own there.
void use_stream_of_thread(c10::Device device);

// The edges of every schedule with that placement, in their order.
std::set<PipeEdge> pipe_edges(const plan::PipeShape& shape);

// Gives a channel the communicators of edges, where it needs them: `open` is called by both ranks of an edge, of which
// `from` is rank 0 there and `to` rank 1.
struct PipeEdges {
  std::set<PipeEdge> all;
  std::function<CommunicatorPtr(const PipeEdge&)> open;
};

struct PipeTraffic {
  int64_t messages = 0, bytes = 0;  // sent
};

class PipeChannel {
 public:
  // `activations` and `grads`: over the same ranks, for this channel alone. Collective. ErrorKind::kValue where they
  // have one queue and nothing opens `edges`.
  PipeChannel(CommunicatorPtr activations, CommunicatorPtr grads, PipeChannelOptions options, PipeEdges edges = {});
  ~PipeChannel();
  PipeChannel(const PipeChannel&) = delete;

  // The batch that this stage works on from now on; messages of another one are an error of recv().
  void begin(bool trains) { batch_ = {batch_.number + 1, trains}; }
  // So many more messages will come from that rank.
  void expect(PipeStream stream, int from, int64_t messages);
  // Tensors must not be changed until settle().
  void send(PipeStream stream, int to, const PipeMessage& message);
  // The next one; waits. ErrorKind::kRuntime where none is expected.
  PipeMessage recv(PipeStream stream, int from);
  bool arrived(PipeStream stream, int from);  // recv() would not wait
  void settle();                              // all sends have left
  // From any thread: every call of this channel ends with this text from now on; the first one counts.
  void abort(const std::string& why);
  std::string failed() const;
  const PipeTraffic& traffic() const { return traffic_; }

 private:
  struct Sent {
    std::vector<WorkPtr> works;
    std::vector<at::Tensor> held;
    std::vector<char> offered;  // the part for which the note has no room
    NoteRing* ring = nullptr;
    int64_t number = 0;                            // there
    PipeOutbox* outbox = nullptr;                  // that sends `granted`
    std::shared_ptr<PipeOutbox::Message> granted;  // when the receiver grants it
  };
  using Key = std::pair<PipeStream, int>;

  bool grants() const { return !edges_.empty() && options_.note_device.is_cpu(); }
  PipeInbox& inbox(PipeStream stream, int from);
  PipeOutbox& outbox(PipeStream stream, int to);
  PipeRoute& route(PipeStream stream, int from, int to);
  PipePeer sender(PipeStream stream, int from);
  PipePeer receiver(PipeStream stream, int to);
  bool end_threads(const std::string& why);
  void abort_communicators(const std::string& why);
  void refuse_if_failed() const;
  void wait_for(Sent& sent, int to);
  void make_room(std::deque<Sent>& under_way, int to);
  void release_taken();
  void send_note(Sent& sent, PipeStream stream, int to, PipeNote note, std::vector<char> described);
  void find_readers();

  const PipeChannelOptions options_;
  PipeBatch batch_;
  std::vector<int64_t> pids_;                       // of ranks whose memory this one reads; 0: it cannot
  std::unique_ptr<NoteRings> notes_;                // that come in: a ring for each rank and stream
  std::vector<std::shared_ptr<NoteRings>> others_;  // those of ranks that read this one's memory, else null
  const OwningProcess owner_;
  const int rank_;
  std::array<PipeRoute, 2> routes_;  // of the streams; empty where edges have their own
  std::map<PipeEdge, PipeRoute> edges_;
  c10::optional<c10::Stream> aside_;  // waits for what has been sent
  std::map<Key, std::deque<Sent>> sent_;
  std::map<Key, int64_t> sequence_;
  std::map<Key, std::unique_ptr<PipeInbox>> inboxes_;
  std::map<Key, std::unique_ptr<PipeOutbox>> outboxes_;
  PipeTraffic traffic_;
  mutable std::mutex mutex_;  // of what follows, and of inboxes_ and outboxes_ while they grow
  std::string failed_;
};

}  // namespace ds::comm
