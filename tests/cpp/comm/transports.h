// Every transport that works with ranks as threads, made for a test.
#pragma once
#include <chrono>
#include <cstdlib>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../on_threads.h"
#include "../stand_in.h"
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

inline std::vector<std::string> transport_names() {
  return {"local",
          "thread",
          "shm",
          "shm_in_background",
          "hierarchical",
          "hierarchical_in_background",
          "nccl",
          "send_and_recv_only",
          "all_to_all_only"};
}

// Whether there is that transport for so many ranks.
inline bool exists(const std::string& transport, int size) {
  return transport == "local" ? size == 1 : begins_with(transport, "hierarchical") ? size > 2 : true;
}

using Body = std::function<void(int rank, Communicator&)>;

// Of rank `rank`, in its thread. `thread`: its communicator between threads.
inline CommunicatorPtr make(const std::string& transport, const CommunicatorPtr& thread, const nccl::UniqueId& id) {
  using std::chrono::seconds;
  const int rank = thread->rank(), size = thread->size();
  if (transport == "local") return local_communicator();
  if (transport == "thread") return thread;
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
  const auto library = NcclLibrary::open(stand_in("fake_nccl"));
  return nccl_communicator_alone(NcclComm::join(library, id, member));
}

inline void on_transport(const std::string& transport, int size, const Body& body) {
  const auto between_threads = thread_communicators(size);
  nccl::UniqueId id;
  if (transport == "nccl") id = NcclLibrary::open(stand_in("fake_nccl"))->make_id();
  on_threads(size, [&](int rank) { body(rank, *make(transport, between_threads[rank], id)); });
}

}  // namespace ds::comm::testing_transports
