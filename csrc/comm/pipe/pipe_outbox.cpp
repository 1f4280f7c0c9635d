#include "comm/pipe/pipe_outbox.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "base/error.h"
#include "comm/decorators/logged.h"
#include "comm/pipe/pipe_channel.h"

namespace ds::comm {

PipeOutbox::PipeOutbox(PipePeer peer, const PipeChannelOptions& options) : PipeThread(peer, options) { start(); }

void PipeOutbox::put(std::shared_ptr<Message> message) {
  if (asynchronous(options_.device)) {
    message->ready.emplace(options_.device.type());
    message->ready->record(c10::impl::VirtualGuardImpl(options_.device.type()).getStream(options_.device));
  }
  const Lock lock(mutex_);
  waiting_.push_back(std::move(message));
  changed_.notify_all();
}

void PipeOutbox::await_issued(const Message& message) {
  Lock lock(mutex_);
  const bool came = changed_.wait_for(lock, options_.timeout, [&] { return message.issued || !ended_.empty(); });
  if (message.issued) return;
  if (came) fail(ErrorKind::kRuntime, ended_);
  fail(ErrorKind::kRuntime, "stage ", peer_.stage, " of the pipeline has not made room for message ", message.number,
       " of ", peer_.what, " within ", options_.timeout.count() / 1000, " s (comm.timeout)");
}

void PipeOutbox::await_grant(int64_t number) {
  peer_.recv_grant(granted_)->wait();
  if (granted_ != number)
    fail(ErrorKind::kRuntime, "stage ", peer_.stage, " of the pipeline has not granted message ", number, " of ",
         peer_.what, " but another one: something else was sent over its communicator");
}

void PipeOutbox::serve(Lock& lock) {
  for (;;) {
    changed_.wait(lock, [&] { return !ended_.empty() || !waiting_.empty(); });
    if (!ended_.empty()) return;
    const std::shared_ptr<Message> message = waiting_.front();
    lock.unlock();
    await_grant(message->number);
    if (message->ready)
      message->ready->block(c10::impl::VirtualGuardImpl(options_.device.type()).getStream(options_.device));
    for (const at::Tensor& tensor : message->tensors) message->works.push_back(peer_.send(tensor));
    lock.lock();
    message->issued = true;
    waiting_.pop_front();
    changed_.notify_all();
  }
}

}  // namespace ds::comm
