#include "comm/decorators/logged.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <thread>
#include <utility>

#include "base/clock.h"

namespace ds::comm {

void finish_device(c10::Device device) {
  if (device.type() == c10::DeviceType::CPU) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  c10::Event event(device.type());
  event.record(guard.getStream(device));
  while (!event.query()) std::this_thread::yield();
}

WorkPtr LoggedCommunicator::start(const Op& op) {
  if (!log_->on() || op.verb == Verb::kBarrier) return inner_->run(op);
  const CallScope scope(log_);
  if (!scope.outermost()) return inner_->run(op);
  const at::Tensor& own = op.own();
  finish_device(own.device());  // so that earlier work of the device is not counted
  const auto begin = Clock::now();
  inner_->run(op)->wait();
  finish_device(own.device());
  const double ms = 1e3 * seconds_since(begin);
  const at::Tensor& passed = op.verb == Verb::kReduceScatter ? op.in : own;
  log_->add({verb_name(op.verb), "engine", static_cast<int64_t>(passed.nbytes()), ms, size()});
  return std::make_shared<DoneWork>();
}

CommunicatorPtr logged(CommunicatorPtr inner, CallLogPtr log) {
  if (!log || std::dynamic_pointer_cast<LoggedCommunicator>(inner)) return inner;
  return std::make_shared<LoggedCommunicator>(std::move(inner), std::move(log));
}

}  // namespace ds::comm
