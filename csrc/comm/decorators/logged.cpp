#include "comm/decorators/logged.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <thread>
#include <utility>

namespace ds::comm {

namespace {

// The host waits until the device has done what was asked of it so far: a work's wait() only orders streams there.
void finish_device(c10::Device device) {
  if (device.type() == c10::DeviceType::CPU) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  c10::Event event(device.type());
  event.record(guard.getStream(device));
  while (!event.query()) std::this_thread::yield();
}

}  // namespace

std::vector<LoggedCall> LoggedCommunicator::take_log() { return std::exchange(log_, {}); }

WorkPtr LoggedCommunicator::start(const Op& op) {
  if (!logging_ || op.verb == Verb::kBarrier) return inner_->run(op);
  const at::Tensor& whole = op.whole();
  finish_device(whole.device());  // so that earlier work of the device is not counted
  const auto begin = std::chrono::steady_clock::now();
  inner_->run(op)->wait();
  finish_device(whole.device());
  const std::chrono::duration<double, std::milli> ms = std::chrono::steady_clock::now() - begin;
  log_.push_back({verb_name(op.verb), whole.numel() * static_cast<int64_t>(whole.element_size()), ms.count()});
  return std::make_shared<DoneWork>();
}

}  // namespace ds::comm
