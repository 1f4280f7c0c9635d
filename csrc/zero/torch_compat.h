// Every difference between torch versions that the engine meets in autograd, streams and events lives here.
#pragma once
#include <c10/core/Event.h>
#include <torch/version.h>

#include <thread>

namespace ds::zero::compat {

// Blocks the host until the event has happened.
inline void synchronize(const c10::Event& event) {
#if TORCH_VERSION_MAJOR >= 2
  event.synchronize();
#else
  while (!event.query()) std::this_thread::yield();
#endif
}

}  // namespace ds::zero::compat
