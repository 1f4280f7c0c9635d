// Every transport that works with ranks as threads, made for a test; on the stand-in device NCCL between its two
// devices.
#pragma once
#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../on_threads.h"
#include "../stand_in.h"
#include "../test_device.h"
#include "base/error.h"
#include "fake_nccl_calls.h"
#include "comm/nccl/nccl_library.h"
#include "comm/transports/hierarchical_communicator.h"
#include "comm/transports/local_communicator.h"
#include "comm/transports/nccl_communicator.h"
#include "comm/transports/shm_communicator.h"
#include "comm/transports/thread_communicator.h"

namespace ds::comm::testing_transports {

// Carries the given verbs only, through another: what is missing has to be composed.
class Restricted : public Communicator {
 public:
  Restricted(CommunicatorPtr inner, std::set<Verb> verbs, bool pairwise)
      : inner_(std::move(inner)), verbs_(std::move(verbs)), pairwise_(pairwise) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string name() const override { return "restricted"; }
  bool carries(const Op& op) const override { return verbs_.count(op.verb) > 0 && inner_->carries(op); }
  PeerMemoryPtr peer_memory(int64_t) override { return nullptr; }
  void abort(const std::string& why) noexcept override { inner_->abort(why); }

 protected:
  WorkPtr start(const Op& op) override { return inner_->run(op); }
  bool pairwise() const override { return pairwise_; }

 private:
  CommunicatorPtr inner_;
  std::set<Verb> verbs_;
  bool pairwise_;
};

inline bool begins_with(const std::string& transport, const char* kind) { return transport.rfind(kind, 0) == 0; }

inline c10::Device device_of(int rank) {
  return on_standin() ? c10::Device(test_device().type(), static_cast<c10::DeviceIndex>(rank)) : test_device();
}

// The communicator of rank `rank`, whose device is current. `host`: for tensors in host memory.
inline CommunicatorPtr nccl_on_device(const CommunicatorPtr& host, const nccl::UniqueId& id) {
  if (const char* why = STANDIN(standin_use_nccl)(fake_nccl_path().c_str())) fail(ErrorKind::kRuntime, why);
  NcclMember member;
  member.name = "on the device";
  member.rank = host->rank();
  member.size = host->size();
  member.timeout = std::chrono::seconds(600);
  member.quiesce = [] {
    STANDIN(standin_empty_cache)();
    return true;
  };
  member.on_device = [device = device_of(host->rank()), as_this = as_this_thread()](const auto& body) {
    const c10::DeviceGuard current(device);
    as_this(body);
  };
  return nccl_communicator(NcclComm::join(NcclLibrary::open(fake_nccl_path()), id, member), host);
}

// Calls with tensors of the host, made with copies on the device.
class OnDevice : public Communicator {
 public:
  OnDevice(CommunicatorPtr inner, c10::Device device) : inner_(std::move(inner)), device_(device) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string name() const override { return "on the device"; }
  bool carries(const Op&) const override { return true; }
  bool groups() const override { return inner_->groups(); }
  PeerMemoryPtr peer_memory(int64_t) override { return nullptr; }
  void abort(const std::string& why) noexcept override { inner_->abort(why); }
  WorkPtr run_all(const std::vector<Op>& ops) override {
    Copies copies{device_};
    std::vector<Op> there;
    for (const Op& op : ops) there.push_back(copies.of(op));
    return copies.then(inner_->run_all(there));
  }

 protected:
  WorkPtr start(const Op& op) override {
    if (op.verb == Verb::kBarrier) return inner_->run(op);
    Copies copies{device_};
    return copies.then(inner_->run(copies.of(op)));
  }

 private:
  struct Copies {
    const c10::Device device;
    std::vector<std::pair<at::Tensor, at::Tensor>> made = {};  // of all memory of a tensor, here and there

    at::Tensor of(const at::Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      for (const auto& [here, there] : made)
        if (here.is_alias_of(tensor))
          return there.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
      const auto numel = static_cast<int64_t>(tensor.storage().nbytes() / tensor.element_size());
      const at::Tensor here = tensor.as_strided({numel}, {1}, 0);
      made.emplace_back(here, here.to(device, /*non_blocking=*/true));
      return of(tensor);
    }
    Op of(const Op& op) {
      Op there = op;
      there.in = of(op.in);
      there.out = of(op.out);
      if (op.more) {
        std::vector<TensorPair> more;
        for (const TensorPair& pair : *op.more) more.push_back({of(pair.in), of(pair.out)});
        there.more = std::make_shared<const std::vector<TensorPair>>(std::move(more));
      }
      return there;
    }
    WorkPtr then(WorkPtr work) const {
      return std::make_shared<JoinedWork>(std::vector<WorkPtr>{std::move(work)}, [made = made] {
        for (const auto& [here, there] : made) here.copy_(there);
      });
    }
  };

  const CommunicatorPtr inner_;
  const c10::Device device_;
};

inline std::vector<std::string> transport_names() {
  return {"local",
          "thread",
          "shm",
          "shm_in_background",
          "hierarchical",
          "hierarchical_in_background",
          "nccl",
          "send_and_recv_only",
          "all_to_all_only",
          "nccl_on_device"};
}

// Whether there is that transport for `size` ranks.
inline bool exists(const std::string& transport, int size) {
  if (transport == "nccl_on_device") return on_standin() && size <= 2;
  return transport == "local" ? size == 1 : begins_with(transport, "hierarchical") ? size > 2 : true;
}

using Body = std::function<void(int rank, Communicator&)>;

// The communicator of rank `rank`, in its thread. `thread`: its communicator between threads.
inline CommunicatorPtr make(const std::string& transport, const CommunicatorPtr& thread, const nccl::UniqueId& id) {
  using std::chrono::seconds;
  const int rank = thread->rank(), size = thread->size();
  if (transport == "local") return local_communicator();
  if (transport == "thread") return thread;
  if (transport == "nccl_on_device") return std::make_shared<OnDevice>(nccl_on_device(thread, id), device_of(rank));
  GroupFacts facts;
  facts.spare_cores = transport.find("_in_background") != std::string::npos;  // on every machine
  if (begins_with(transport, "shm")) return shm_communicator(thread, seconds(600), facts);
  if (begins_with(transport, "hierarchical"))  // two hosts, ranks in turn, and one that is alone where there are many
    return hierarchical_communicator(thread, seconds(600), facts, size > 5 && rank == 4 ? 9 : rank % 2);
  if (transport == "send_and_recv_only")
    return std::make_shared<Restricted>(thread, std::set<Verb>{Verb::kSend, Verb::kRecv}, true);
  if (transport == "all_to_all_only")
    return std::make_shared<Restricted>(thread, std::set<Verb>{Verb::kAllToAll}, false);
  NcclMember member;
  member.name = "tested";
  member.rank = rank;
  member.size = size;
  member.timeout = seconds(600);
  member.on_device = as_this_thread();
  const auto library = NcclLibrary::open(stand_in("fake_nccl"));
  return nccl_communicator_alone(NcclComm::join(library, id, member));
}

inline void on_transport(const std::string& transport, int size, const Body& body) {
  const auto between_threads = thread_communicators(size);
  nccl::UniqueId id;
  if (begins_with(transport, "nccl")) id = NcclLibrary::open(stand_in("fake_nccl"))->make_id();
  on_threads(size, [&](int rank) {
    const c10::DeviceGuard current(device_of(rank));
    body(rank, *make(transport, between_threads[rank], id));
  });
}

}  // namespace ds::comm::testing_transports
