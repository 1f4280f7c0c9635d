#include "comm/pipe/pipe_peer.h"

#include <c10/core/GradMode.h>

#include "comm/pipe/pipe_channel.h"

namespace ds::comm {

WorkPtr PipePeer::send(const at::Tensor& tensor) const {
  const std::lock_guard lock(route.issuing);
  return route.communicator->send(tensor, place);
}

WorkPtr PipePeer::recv(const at::Tensor& tensor) const {
  const std::lock_guard lock(route.issuing);
  return route.communicator->recv(tensor, place);
}

WorkPtr PipePeer::send_grant(int64_t& number) const {
  const std::lock_guard lock(route.issuing);
  return route.communicator->bare().send(bytes_at(&number, sizeof(number)), place);
}

WorkPtr PipePeer::recv_grant(int64_t& number) const {
  const std::lock_guard lock(route.issuing);
  return route.communicator->bare().recv(bytes_at(&number, sizeof(number)), place);
}

bool PipeThread::end(const std::string& why) {
  const Lock lock(mutex_);
  if (ended_.empty()) ended_ = why;
  changed_.notify_all();
  return interrupt();
}

void PipeThread::start() {
  thread_ = std::thread([this] {
    at::NoGradGuard no_grad;
    Lock lock(mutex_);
    try {
      use_stream_of_thread(options_.device);
      serve(lock);
    } catch (const std::exception& error) {
      if (!lock.owns_lock()) lock.lock();
      if (ended_.empty()) ended_ = error.what();
      changed_.notify_all();
    }
  });
}

}  // namespace ds::comm
