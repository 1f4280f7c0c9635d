// Every difference between torch versions that the engine meets in autograd, streams and events lives here.
#pragma once
#include <c10/core/Event.h>

#include <thread>
#include <type_traits>
#include <utility>

namespace ds::zero::compat {

// Events can wait by themselves from 2.4 on.
template <typename Event, typename = void>
struct CanWait : std::false_type {};
template <typename Event>
struct CanWait<Event, std::void_t<decltype(std::declval<const Event&>().synchronize())>> : std::true_type {};

// Blocks the host until the event has happened.
template <typename Event>
void synchronize(const Event& event) {
  if constexpr (CanWait<Event>::value) {
    event.synchronize();
  } else {
    while (!event.query()) std::this_thread::yield();
  }
}

}  // namespace ds::zero::compat
