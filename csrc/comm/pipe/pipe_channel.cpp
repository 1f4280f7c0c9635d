#include "comm/pipe/pipe_channel.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "comm/calls/one_queue.h"
#include "comm/decorators/logged.h"
#include "comm/pipe/peer_reads.h"
#include "comm/segments/shared_segments.h"

namespace ds::comm {

namespace {

constexpr const char* kStreamNames[] = {"activations", "gradients"};

}  // namespace

void use_stream_of_thread(c10::Device device) {
  if (!asynchronous(device)) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  guard.setDevice(device);
  guard.exchangeStream(guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true));
}

std::set<PipeEdge> pipe_edges(const plan::PipeShape& shape) {
  std::set<PipeEdge> edges;
  for (int part = 0; part < shape.virtual_stages(); ++part)
    if (const int rank = shape.rank_of(part), next = shape.other_rank(part, 1); next >= 0) {
      edges.insert({PipeStream::kActivations, rank, next});
      edges.insert({PipeStream::kGrads, next, rank});
    }
  return edges;
}

PipeChannel::PipeChannel(CommunicatorPtr activations, CommunicatorPtr grads, PipeChannelOptions options,
                         PipeEdges edges)
    : options_(options),
      pids_(activations->size()),
      others_(activations->size()),
      rank_(activations->rank()),
      routes_{{{std::move(activations), {}}, {std::move(grads), {}}}} {
  if (has_one_queue(*routes_[0].communicator)) {
    if (!edges.open)
      fail(ErrorKind::kValue, "sends and receives of ", routes_[0].communicator->name(),
           " share one queue: say how the channel of a pipeline opens a communicator for each edge");
    for (const PipeEdge& edge : edges.all)
      if (edge.from == rank_ || edge.to == rank_) edges_[edge].communicator = edges.open(edge);
    for (PipeRoute& route : routes_) route.communicator = nullptr;
    return;
  }
  if (options_.device.is_cpu() && options_.direct && options_.bound <= static_cast<int>(NoteRing::kSlots))
    find_readers();
}

// Each rank shows a word of its memory and its rings. A rank that can read the word and open the rings says so.
void PipeChannel::find_readers() {
  Communicator& all = *routes_[0].communicator;
  const int rank = rank_, size = all.size();
  notes_ = std::make_unique<NoteRings>(2 * size);
  uint64_t word = static_cast<uint64_t>(notes_->file().nonce);  // not one that is in another process at this address
  const at::TensorOptions longs = at::TensorOptions().dtype(at::kLong);
  const auto gather = [&](std::vector<int64_t> mine) {
    const auto width = static_cast<int64_t>(mine.size());
    const at::Tensor rows = at::empty({size, width}, longs);
    all.all_gather(at::from_blob(mine.data(), {width}, longs).clone(), rows)->wait();
    return rows;
  };
  constexpr int64_t kFacts = 5;
  const at::Tensor facts = gather({host_id(), getpid(), static_cast<int64_t>(reinterpret_cast<uintptr_t>(&word)),
                                   notes_->file().file, notes_->file().nonce});
  enum : int64_t { kReads = 1, kOpens = 2 };
  std::vector<int64_t> can(size);
  for (int other = 0; other < size; ++other) {
    const auto* theirs = facts.data_ptr<int64_t>() + kFacts * other;
    if (other == rank || theirs[0] != host_id()) continue;
    uint64_t seen = 0;
    if (read_peer(theirs[1], static_cast<uint64_t>(theirs[2]), &seen, sizeof(seen)) &&
        seen == static_cast<uint64_t>(theirs[4]))
      can[other] |= kReads;
    others_[other] = NoteRings::of({theirs[1], theirs[3], theirs[4]}, 2 * size);
    if (others_[other]) can[other] |= kOpens;
  }
  const at::Tensor matrix = gather(can);  // the words are not needed any more
  const auto goes = [&](int from, int to) {
    const auto* rows = matrix.data_ptr<int64_t>();
    return (rows[to * size + from] & kReads) && (rows[from * size + to] & kOpens);
  };
  for (int other = 0; other < size; ++other) {
    if (goes(other, rank)) pids_[other] = facts.data_ptr<int64_t>()[kFacts * other + 1];
    if (!goes(rank, other)) others_[other] = nullptr;
  }
}

PipeChannel::~PipeChannel() {
  const char* const why = "the pipeline has been closed";
  if (owner_.here() && end_threads(why)) abort_communicators(why);
  for (auto& [key, inbox] : inboxes_) inbox->join(owner_.here());
  for (auto& [key, outbox] : outboxes_) outbox->join(owner_.here());
}

// True: a call over a communicator is on its way.
bool PipeChannel::end_threads(const std::string& why) {
  bool in_call = false;
  for (auto& [key, inbox] : inboxes_) in_call |= inbox->end(why);
  for (auto& [key, outbox] : outboxes_) in_call |= outbox->end(why);
  return in_call;
}

void PipeChannel::abort_communicators(const std::string& why) {
  for (const PipeRoute& route : routes_)
    if (route.communicator) route.communicator->bare().abort(why);
  for (const auto& [edge, route] : edges_) route.communicator->bare().abort(why);
}

// ErrorKind::kValue where the plan has no such edge.
PipeRoute& PipeChannel::route(PipeStream stream, int from, int to) {
  if (edges_.empty()) return routes_[static_cast<size_t>(stream)];
  const auto found = edges_.find({stream, from, to});
  if (found == edges_.end())
    fail(ErrorKind::kValue, "no ", kStreamNames[static_cast<size_t>(stream)], " go from stage ", from, " to stage ", to,
         " in the plan of this pipeline, so there is no communicator for them");
  return found->second;
}

// An edge's sender is rank 0 of its communicator, and the receiver rank 1.
PipePeer PipeChannel::sender(PipeStream stream, int from) {
  return {route(stream, from, rank_), from, edges_.empty() ? from : 0, kStreamNames[static_cast<size_t>(stream)]};
}

PipePeer PipeChannel::receiver(PipeStream stream, int to) {
  return {route(stream, rank_, to), to, edges_.empty() ? to : 1, kStreamNames[static_cast<size_t>(stream)]};
}

std::string PipeChannel::failed() const {
  std::lock_guard lock(mutex_);
  return failed_;
}

void PipeChannel::abort(const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    if (!failed_.empty()) return;
    failed_ = why.empty() ? "it was not said why" : why;  // from here on neither map grows
  }
  end_threads(failed_);
  for (int other = 0; other < static_cast<int>(others_.size()); ++other)
    for (int stream = 0; stream < 2; ++stream) {
      if (pids_[other]) notes_->at(2 * other + stream).close(why);
      if (others_[other]) others_[other]->at(2 * rank_ + stream).close(why);
    }
  abort_communicators(why);
}

void PipeChannel::refuse_if_failed() const {
  const std::string why = failed();
  if (!why.empty()) fail(ErrorKind::kRuntime, why);
}

PipeInbox& PipeChannel::inbox(PipeStream stream, int from) {
  std::lock_guard lock(mutex_);
  if (!failed_.empty()) fail(ErrorKind::kRuntime, failed_);
  const PipePeer peer = sender(stream, from);  // refuses what the plan does not have
  auto& found = inboxes_[{stream, from}];
  if (!found) {
    NoteRing* const ring = pids_.at(from) ? &notes_->at(2 * from + static_cast<int>(stream)) : nullptr;
    found = std::make_unique<PipeInbox>(peer, PipeInbox::Source{pids_[from], ring, grants()}, options_);
  }
  return *found;
}

PipeOutbox& PipeChannel::outbox(PipeStream stream, int to) {
  std::lock_guard lock(mutex_);
  if (!failed_.empty()) fail(ErrorKind::kRuntime, failed_);
  const PipePeer peer = receiver(stream, to);
  auto& found = outboxes_[{stream, to}];
  if (!found) found = std::make_unique<PipeOutbox>(peer, options_);
  return *found;
}

void PipeChannel::expect(PipeStream stream, int from, int64_t messages) { inbox(stream, from).expect(messages); }

PipeMessage PipeChannel::recv(PipeStream stream, int from) {
  release_taken();
  try {
    PipeMessage message = inbox(stream, from).take();
    if (!batch_.meets(message.batch))
      fail(ErrorKind::kRuntime, "stages of the pipeline work on different batches: stage ", from, " has sent ",
           stream == PipeStream::kGrads ? "gradients" : "activations", " of ", message.batch.text(),
           ", and this stage is in ", batch_.text(),
           ". Every stage has to call train_batch and eval_batch alike, also where `if rank == 0` surrounds them");
    return message;
  } catch (const std::exception&) {
    refuse_if_failed();  // the reason goes before what came of it
    throw;
  }
}

bool PipeChannel::arrived(PipeStream stream, int from) { return inbox(stream, from).arrived(); }

// Tensors that their receiver has are not held until the next send waits for them.
void PipeChannel::release_taken() {
  for (auto& [key, under_way] : sent_)
    while (!under_way.empty() && under_way.front().ring && under_way.front().ring->done(under_way.front().number, {}))
      under_way.pop_front();
}

void PipeChannel::wait_for(Sent& sent, int to) {
  try {
    if (sent.granted) {
      sent.outbox->await_issued(*sent.granted);
      for (const WorkPtr& work : sent.granted->works) work->wait();
    }
    for (const WorkPtr& work : sent.works) work->wait();
    if (!sent.ring) return;
    const auto deadline = Clock::now() + options_.timeout;
    while (!sent.ring->done(sent.number, milliseconds(20))) {
      refuse_if_failed();
      const std::string closed = sent.ring->closed();
      if (!closed.empty()) fail(ErrorKind::kRuntime, closed);
      if (Clock::now() > deadline)
        fail(ErrorKind::kRuntime, "stage ", to, " of the pipeline has not taken message ", sent.number, " within ",
             options_.timeout.count() / 1000, " s (comm.timeout)");
    }
  } catch (const std::exception&) {
    refuse_if_failed();  // whoever has aborted the wait has said why
    throw;
  }
}

// The host waits, not the current stream: what is computed there must not wait for what another stage receives.
void PipeChannel::make_room(std::deque<Sent>& under_way, int to) {
  const c10::Device device = options_.device;
  c10::OptionalStreamGuard aside;
  if (asynchronous(device)) {
    if (!aside_) aside_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
    aside.reset_stream(*aside_);
  }
  for (; static_cast<int>(under_way.size()) >= options_.bound; under_way.pop_front()) {
    wait_for(under_way.front(), to);
    finish_device(device);
  }
  refuse_if_failed();  // a device goes on where a send was aborted
}

void PipeChannel::send(PipeStream stream, int to, const PipeMessage& message) {
  at::NoGradGuard no_grad;
  refuse_if_failed();
  release_taken();
  std::deque<Sent>& under_way = sent_[{stream, to}];
  if (static_cast<int>(under_way.size()) >= options_.bound) make_room(under_way, to);
  PipeNote note;
  note.pieces = static_cast<uint32_t>(message.pieces.size());
  note.packed = static_cast<uint32_t>(message.packed) | batch_.word() << 1;
  note.sequence = sequence_[{stream, to}]++;
  std::vector<char> described = describe_pieces(message);
  Sent sent;
  for (const PipePiece& piece : message.pieces) {
    if (!piece.tensor.defined() || piece.tensor.numel() == 0) continue;
    sent.held.push_back(piece.tensor.detach().to(options_.device).contiguous());
    traffic_.bytes += static_cast<int64_t>(sent.held.back().nbytes());
  }
  ++traffic_.messages;
  if (others_.at(to)) {
    sent.ring = &others_[to]->at(2 * rank_ + static_cast<int>(stream));
    sent.number = note.sequence;
    note.tensors = static_cast<uint32_t>(sent.held.size());
    for (const at::Tensor& tensor : sent.held) {
      const auto address = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(tensor.data_ptr()));
      const auto* bytes = reinterpret_cast<const char*>(&address);
      described.insert(described.end(), bytes, bytes + sizeof(address));
    }
  }
  send_note(sent, stream, to, note, std::move(described));
  under_way.push_back(std::move(sent));
}

// And what travels behind it, over a communicator.
void PipeChannel::send_note(Sent& sent, PipeStream stream, int to, PipeNote note, std::vector<char> described) {
  note.described = static_cast<int64_t>(described.size());
  const bool fits = note.described <= PipeNote::kRoom;
  if (fits) std::copy(described.begin(), described.end(), note.text);
  if (sent.ring) {
    sent.offered = std::move(described);
    note.offer = fits ? 0 : static_cast<uint64_t>(reinterpret_cast<uintptr_t>(sent.offered.data()));
    return sent.ring->put(note);
  }
  const auto travels = [&](const void* data, int64_t size) {
    const at::Tensor made = at::empty({size}, at::TensorOptions().dtype(at::kByte));
    std::memcpy(made.data_ptr(), data, static_cast<size_t>(size));
    return made.to(options_.note_device);
  };
  std::vector<at::Tensor> first{travels(&note, PipeNote::kBytes)};
  if (!fits) first.push_back(travels(described.data(), note.described));
  const PipePeer peer = receiver(stream, to);
  const auto issue = [&](const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) sent.works.push_back(peer.send(tensor));
  };
  issue(first);
  if (!grants())
    issue(sent.held);
  else if (!sent.held.empty()) {
    sent.outbox = &outbox(stream, to);
    sent.granted = std::make_shared<PipeOutbox::Message>();
    sent.granted->number = note.sequence;
    sent.granted->tensors = sent.held;
    sent.outbox->put(sent.granted);
  }
  sent.held.insert(sent.held.end(), first.begin(), first.end());
}

void PipeChannel::settle() {
  for (auto& [key, under_way] : sent_) {
    for (; !under_way.empty(); under_way.pop_front()) wait_for(under_way.front(), key.second);
  }
}

}  // namespace ds::comm
