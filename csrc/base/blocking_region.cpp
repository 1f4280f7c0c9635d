#include "base/blocking_region.h"

#include <atomic>

namespace ds {
namespace {

std::atomic<BlockingRegion> blocking_region{nullptr};

}  // namespace

void set_blocking_region(BlockingRegion region) { blocking_region.store(region); }

void in_blocking_region(const std::function<void()>& wait) {
  const BlockingRegion region = blocking_region.load();
  region ? region(wait) : wait();
}

std::unique_lock<std::mutex> locked(std::mutex& mutex) {
  std::unique_lock held(mutex, std::try_to_lock);
  if (!held.owns_lock()) in_blocking_region([&held] { held.lock(); });
  return held;
}

}  // namespace ds
