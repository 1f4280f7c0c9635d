// Every difference between torch versions in c10d lives here, in what devices tell of communication, and in how rooms
// before `zero` make nodes of autograd.
#pragma once
#include <torch/csrc/autograd/function.h>
#include <torch/version.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#if TORCH_VERSION_MAJOR >= 2
#include <torch/csrc/distributed/c10d/Backend.hpp>
#endif

#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <string>
#include <type_traits>
#include <utility>

namespace ds::comm::compat {

// The base class of a backend. 2.x puts a ProcessGroup in front of it, one backend for each device.
#if TORCH_VERSION_MAJOR >= 2
using BackendBase = c10d::Backend;
#else
using BackendBase = c10d::ProcessGroup;
#endif

// Whether the caller goes on before the collective has ended; unset: 1.13 does not say.
template <typename Options, typename = void>
struct SaysAsync : std::false_type {};
template <typename Options>
struct SaysAsync<Options, std::void_t<decltype(std::declval<Options>().asyncOp)>> : std::true_type {};
template <typename Options>
c10::optional<bool> runs_later(const Options& options) {
  if constexpr (SaysAsync<Options>::value) {
    return options.asyncOp;
  } else {
    return c10::nullopt;
  }
}

// Whether gloo moves the group's tensors, by the name of the group, or by those of its backends: 2.x may know them
// under another name.
inline bool is_gloo(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (group->getBackendName().find("gloo") != std::string::npos) return true;
#if TORCH_VERSION_MAJOR >= 2
  for (const c10::Device& device : group->getDeviceTypes()) {
    try {
      if (group->getBackend(device.type())->getBackendName() == "gloo") return true;
    } catch (const c10::Error&) {  // a backend that has no name
    }
  }
#endif
  return false;
}

// Debian's gloo (1.13) refuses bf16 in every collective; 2.x carries it.
inline bool gloo_carries_bf16() { return TORCH_VERSION_MAJOR >= 2; }

// Events tell the time between them from 2.4 on.
template <typename Event, typename = void>
struct TellsTime : std::false_type {};
template <typename Event>
struct TellsTime<Event, std::void_t<decltype(std::declval<const Event&>().elapsedTime(std::declval<const Event&>()))>>
    : std::true_type {};
template <typename Event>
constexpr bool tells_time() {
  return TellsTime<Event>::value;
}

// Between two events that have happened; 0 where events do not tell.
template <typename Event>
double milliseconds(const Event& begin, const Event& end) {
  if constexpr (TellsTime<Event>::value) {
    return begin.elapsedTime(end);
  } else {
    return 0;
  }
}

// The pointer under which autograd keeps a node.
using NodePtr = decltype(torch::autograd::Edge::function);

// A node of autograd under the pointer that autograd keeps: an intrusive one from 2.15 on, before that a shared one
// whose deleter frees long graphs without recursion.
template <typename Node, typename... Args>
auto make_node(Args&&... args) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>) {
    return c10::make_intrusive<Node>(std::forward<Args>(args)...);
  } else {
    return std::shared_ptr<Node>(new Node(std::forward<Args>(args)...), [](Node* node) { deleteNode(node); });
  }
}

}  // namespace ds::comm::compat
