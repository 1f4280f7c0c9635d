#include "comm/pipe/pipe_outbox.h"

#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "base/error.h"
#include "comm/decorators/logged.h"
#include "comm/pipe/pipe_channel.h"

namespace ds::comm {

PipeOutbox::PipeOutbox(Target target, const PipeChannelOptions& options)
    : target_(std::move(target)), options_(options), thread_([this] { serve(); }) {}

void PipeOutbox::put(std::shared_ptr<Message> message) {
  if (asynchronous(options_.device)) {
    message->ready.emplace(options_.device.type());
    message->ready->record(c10::impl::VirtualGuardImpl(options_.device.type()).getStream(options_.device));
  }
  const std::lock_guard lock(mutex_);
  waiting_.push_back(std::move(message));
  changed_.notify_all();
}

void PipeOutbox::await_issued(const Message& message) {
  std::unique_lock lock(mutex_);
  const bool came = changed_.wait_for(lock, options_.timeout, [&] { return message.issued || !ended_.empty(); });
  if (message.issued) return;
  if (came) fail(ErrorKind::kRuntime, ended_);
  fail(ErrorKind::kRuntime, "stage ", target_.to, " of the pipeline has not made room for message ", message.number,
       " of ", target_.what, " within ", options_.timeout.count() / 1000, " s (comm.timeout)");
}

bool PipeOutbox::end(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (ended_.empty()) ended_ = why;
  changed_.notify_all();
  return !waiting_.empty();
}

void PipeOutbox::await_grant(int64_t number) {
  WorkPtr work;
  {
    const std::lock_guard lock(target_.issuing);
    work = target_.communicator->bare().recv(bytes_at(&granted_, sizeof(granted_)), target_.place);
  }
  work->wait();
  if (granted_ != number)
    fail(ErrorKind::kRuntime, "stage ", target_.to, " of the pipeline has not granted message ", number, " of ",
         target_.what, " but another one: something else was sent over its communicator");
}

void PipeOutbox::serve() {
  at::NoGradGuard no_grad;
  std::unique_lock lock(mutex_);
  try {
    use_stream_of_thread(options_.device);
    for (;;) {
      changed_.wait(lock, [&] { return !ended_.empty() || !waiting_.empty(); });
      if (!ended_.empty()) return;
      const std::shared_ptr<Message> message = waiting_.front();
      lock.unlock();
      await_grant(message->number);
      if (message->ready)
        message->ready->block(c10::impl::VirtualGuardImpl(options_.device.type()).getStream(options_.device));
      {
        const std::lock_guard issuing(target_.issuing);
        for (const at::Tensor& tensor : message->tensors)
          message->works.push_back(target_.communicator->send(tensor, target_.place));
      }
      lock.lock();
      message->issued = true;
      waiting_.pop_front();
      changed_.notify_all();
    }
  } catch (const std::exception& error) {
    if (!lock.owns_lock()) lock.lock();
    if (ended_.empty()) ended_ = error.what();
    changed_.notify_all();
  }
}

}  // namespace ds::comm
