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

// Hooks of tensors have a list of their own in nodes of autograd from 2.0 on.
template <typename Node, typename = void>
struct HasTensorHooks : std::false_type {};
template <typename Node>
struct HasTensorHooks<Node, std::void_t<decltype(std::declval<Node&>().tensor_pre_hooks())>> : std::true_type {};

// Whether something looks at the gradients before the node of autograd does.
template <typename Node>
bool has_pre_hooks(Node& node) {
  if constexpr (HasTensorHooks<Node>::value) {
    if (!node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty()) return true;
  }
  return !node.pre_hooks().empty();
}

}  // namespace ds::zero::compat
