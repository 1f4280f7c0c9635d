#include "comm/pipe/pipe_inbox.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "comm/decorators/logged.h"
#include "comm/pipe/peer_reads.h"
#include "comm/pipe/pipe_channel.h"

namespace ds::comm {

namespace {

constexpr size_t kChunkBytes = 2 << 20;  // copied at a time, by one thread
constexpr milliseconds kMoment(200);     // how long a waiter sleeps before it looks whether all has ended

}  // namespace

PipeInbox::PipeInbox(PipePeer peer, Source source, const PipeChannelOptions& options)
    : PipeThread(peer, options), source_(source) {
  if (options_.ahead > 0) start();
}

void PipeInbox::expect(int64_t messages) {
  const Lock lock(mutex_);
  expected_ += messages;
  changed_.notify_all();
}

PipeMessage PipeInbox::take() {
  Lock lock(mutex_);
  if (taken_ == expected_ && ended_.empty())
    fail(ErrorKind::kRuntime, "no message of ", peer_.what, " is expected from stage ", peer_.stage,
         " of the pipeline: say so before with expect()");
  if (options_.ahead == 0 && ended_.empty()) return receive_now(lock);
  await(lock);
  if (ready_.empty()) fail(ErrorKind::kRuntime, ended_);
  Arrived arrived = std::move(ready_.front());
  ready_.pop_front();
  ++taken_;
  changed_.notify_all();
  // The thread was not woken for what came while this one was waiting.
  if (source_.ring && received_ < expected_ && source_.ring->arrived(received_, NoteRing::kCaller, {}))
    source_.ring->wake(NoteRing::kThread);
  lock.unlock();
  if (arrived.done) {
    const c10::Stream current = c10::impl::VirtualGuardImpl(options_.device.type()).getStream(options_.device);
    arrived.done->block(current);
    for (const PipePiece& piece : arrived.message.pieces)
      if (piece.tensor.defined()) piece.tensor.record_stream(current);
  }
  return std::move(arrived.message);
}

PipeMessage PipeInbox::receive_now(Lock& lock) {
  busy_ = true;
  lock.unlock();
  PipeMessage message = receive().message;
  lock.lock();
  busy_ = false;
  ++received_;
  ++taken_;
  return message;
}

// Until something is ready, or all has ended.
void PipeInbox::await(Lock& lock) {
  const auto over = [&] { return !ready_.empty() || !ended_.empty(); };
  if (!source_.ring) return changed_.wait(lock, over);
  const auto deadline = Clock::now() + options_.timeout;
  while (!over()) {
    if (busy_) {
      if (!help(lock)) changed_.wait_for(lock, kMoment);
    } else if (!take_next(lock, NoteRing::kCaller) && Clock::now() > deadline && !over()) {
      fail(ErrorKind::kRuntime, "message ", received_, " of ", peer_.what, " from stage ", peer_.stage,
           " of the pipeline has not come within ", options_.timeout.count() / 1000, " s (comm.timeout)");
    }
  }
}

bool PipeInbox::arrived() {
  const Lock lock(mutex_);
  return !ready_.empty() || (source_.ring && source_.ring->arrived(received_, NoteRing::kCaller, {}));
}

bool PipeInbox::interrupt() {
  if (source_.ring) source_.ring->wake(NoteRing::kThread | NoteRing::kCaller);
  return busy_ && !source_.ring;
}

bool PipeInbox::may_receive() const {
  return !busy_ && received_ < expected_ && static_cast<int>(ready_.size()) < options_.ahead;
}

void PipeInbox::serve(Lock& lock) {
  for (;;) {
    changed_.wait(lock, [&] { return !ended_.empty() || may_receive() || (copying_ && copying_->has_more()); });
    if (!ended_.empty()) return;
    if (!help(lock) && may_receive()) take_next(lock, NoteRing::kThread);
  }
}

// Receives the next message, if no other thread does meanwhile. False: over a ring it has not come within a moment.
bool PipeInbox::take_next(Lock& lock, NoteRing::Waiter waiter) {
  if (source_.ring) {
    const int64_t number = received_;
    busy_ = waiter == NoteRing::kCaller;
    lock.unlock();
    const bool came = source_.ring->arrived(number, waiter, kMoment);
    lock.lock();
    if (waiter == NoteRing::kThread && (busy_ || received_ != number)) return false;
    busy_ = false;
    if (!came && ended_.empty()) ended_ = source_.ring->closed();
    if (!came || !ended_.empty()) return false;
  }
  busy_ = true;
  lock.unlock();
  std::optional<Arrived> arrived;
  std::string failed;  // nothing comes after it
  try {
    arrived.emplace(source_.ring ? read_offered() : receive());
  } catch (const std::exception& error) {
    failed = error.what();
  }
  lock.lock();
  busy_ = false;
  changed_.notify_all();
  if (!arrived) {
    if (ended_.empty()) ended_ = failed;
    return false;
  }
  ready_.push_back(std::move(*arrived));
  ++received_;
  return true;
}

void PipeInbox::receive_bytes(void* data, int64_t size) {
  if (options_.note_device.is_cpu()) return peer_.recv(bytes_at(data, size))->wait();
  const at::Tensor there = at::empty({size}, at::TensorOptions().dtype(at::kByte).device(options_.note_device));
  peer_.recv(there)->wait();
  bytes_at(data, size).copy_(there);
}

// Takes a share of a copy that another thread makes. False: there is none.
bool PipeInbox::help(Lock& lock) {
  const std::shared_ptr<Copying> copying = copying_;
  if (!copying || !copying->has_more()) return false;
  lock.unlock();
  copy_chunks(*copying);
  lock.lock();
  return true;
}

void PipeInbox::copy_chunks(Copying& copying) const {
  for (size_t index = copying.next++; index < copying.chunks.size(); index = copying.next++) {
    const Chunk& chunk = copying.chunks[index];
    if (!read_peer(source_.pid, chunk.from, chunk.to, chunk.bytes)) copying.failed = true;
    ++copying.done;
  }
}

void PipeInbox::copy_all(std::vector<Chunk> chunks) {
  const auto copying = std::make_shared<Copying>();
  copying->chunks = std::move(chunks);
  const bool shares = copying->chunks.size() > 1;
  if (shares) {
    const Lock lock(mutex_);
    copying_ = copying;
    changed_.notify_all();
    source_.ring->wake(NoteRing::kThread);
  }
  copy_chunks(*copying);
  while (copying->done < copying->chunks.size()) std::this_thread::yield();  // a helper copies the last ones
  if (shares) {
    const Lock lock(mutex_);
    copying_ = nullptr;
  }
  if (copying->failed)
    fail(ErrorKind::kRuntime, "the memory of stage ", peer_.stage, " of the pipeline (process ", source_.pid,
         ") cannot be read any more: it has ended");
}

void PipeInbox::check(const PipeNote& note) {
  if (note.magic != PipeNote::kMagic || note.sequence != received_)
    fail(ErrorKind::kRuntime, "message ", received_, " of ", peer_.what, " from stage ", peer_.stage,
         " of the pipeline is not one: something else was sent over its communicator");
}

// The sender has the tensors, and what does not fit into the note, ready in its memory until this is done.
PipeInbox::Arrived PipeInbox::read_offered() {
  at::NoGradGuard no_grad;
  const PipeNote& note = source_.ring->note(received_);
  check(note);
  std::vector<char> more;
  const char* described = note.text;
  if (note.offer) {
    more.resize(note.described);
    copy_all({{note.offer, more.data(), more.size()}});
    described = more.data();
  }
  const int64_t addresses = note.described - note.tensors * static_cast<int64_t>(sizeof(uint64_t));
  Arrived arrived{{empty_pieces(described, addresses, note.pieces, options_.device, buffers_), (note.packed & 1u) != 0, PipeBatch::of(note.packed >> 1)}, {}};
  const char* at = described + addresses;
  std::vector<Chunk> chunks;
  for (const PipePiece& piece : arrived.message.pieces) {
    if (!piece.tensor.defined() || piece.tensor.numel() == 0) continue;
    uint64_t from = 0;
    std::memcpy(&from, at, sizeof(from));
    at += sizeof(from);
    const auto bytes = static_cast<size_t>(piece.tensor.nbytes());
    for (size_t done = 0; done < bytes; done += kChunkBytes)
      chunks.push_back(
          {from + done, static_cast<char*>(piece.tensor.data_ptr()) + done, std::min(kChunkBytes, bytes - done)});
  }
  copy_all(std::move(chunks));
  source_.ring->finish(received_);
  return arrived;
}

// The tensors of this message have memory.
void PipeInbox::grant() {
  if (granting_) granting_->wait();
  granted_ = received_;
  granting_ = peer_.send_grant(granted_);
}

PipeInbox::Arrived PipeInbox::receive() {
  PipeNote note;
  receive_bytes(&note, PipeNote::kBytes);
  check(note);
  std::vector<char> more;
  const char* described = note.text;
  if (note.described > PipeNote::kRoom) {
    more.resize(note.described);
    receive_bytes(more.data(), note.described);
    described = more.data();
  }
  Arrived arrived{{empty_pieces(described, note.described, note.pieces, options_.device, buffers_),
                   (note.packed & 1u) != 0, PipeBatch::of(note.packed >> 1)},
                  {}};
  std::vector<at::Tensor> coming;
  for (const PipePiece& piece : arrived.message.pieces)
    if (piece.tensor.defined() && piece.tensor.numel() > 0) coming.push_back(piece.tensor);
  // Before the receives: NCCL's first receive from a rank returns when that rank has called its send.
  if (source_.grants && !coming.empty()) grant();
  std::vector<WorkPtr> works;
  for (const at::Tensor& tensor : coming) works.push_back(peer_.recv(tensor));
  for (const WorkPtr& work : works) work->wait();
  if (asynchronous(options_.device)) {
    const c10::impl::VirtualGuardImpl guard(options_.device.type());
    arrived.done.emplace(options_.device.type());
    arrived.done->record(guard.getStream(options_.device));
  }
  return arrived;
}

}  // namespace ds::comm
