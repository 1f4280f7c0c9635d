#include "comm/decorators/step_waits.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
#include <iterator>

#include "comm/c10d_compat.h"

namespace ds::comm {

std::optional<c10::Event> StepWaits::now() noexcept {
  try {
    std::optional<c10::Event> event(events_.take());
    event->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
    return event;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

void StepWaits::begin() noexcept {
  if (device_.is_cpu()) return;
  const std::lock_guard lock(mutex_);
  if (depth_++ == 0) begun_ = now();
}

void StepWaits::end() noexcept {
  if (device_.is_cpu()) return;
  const std::lock_guard lock(mutex_);
  if (--depth_ > 0 || !begun_) return;
  if (std::optional<c10::Event> over = now()) pairs_.emplace_back(std::move(*begun_), std::move(*over));
  begun_.reset();
}

void StepWaits::end_step() {
  const std::lock_guard lock(mutex_);
  ended_.insert(ended_.end(), std::move_iterator(pairs_.begin()), std::move_iterator(pairs_.end()));
  pairs_.clear();
}

std::optional<double> StepWaits::take() {
  if (device_.is_cpu() || !compat::tells_time<c10::Event>()) return std::nullopt;
  const std::lock_guard lock(mutex_);
  double seconds = 0;
  std::vector<Pair> left;
  try {
    for (Pair& pair : ended_) {
      if (!pair.second.query()) {
        left.push_back(std::move(pair));
        continue;
      }
      seconds += compat::milliseconds(pair.first, pair.second) * 1e-3;
      events_.give(std::move(pair.first));
      events_.give(std::move(pair.second));
    }
    ended_ = std::move(left);
  } catch (const std::exception&) {
    ended_.clear();
    return std::nullopt;
  }
  return seconds;
}

}  // namespace ds::comm
