// NCCL called directly, beside torch's process group, for features that c10d lacks: registered user buffers
// (nccl_memory.h) and several calls as one.
//
// Contract: raw device pointers, element counts, and the stream to put the work on (a cudaStream_t). Calls return when
// the work is on the stream, before it has ended. Every rank issues the same calls in the same order.
// `in` may be `out` where NCCL works in place (in all_gather `in` is this rank's row of `out`),
// else they do not overlap. Counts of zero do nothing. Ranks are those of the communicator.
//
// [Note: errors and timeout] A missing rank or an error of NCCL, now or later from its own threads, becomes one
// ds::Error with the name, the rank and the call, and aborts the communicator, so that streams stop waiting for it; all
// further calls repeat that error. Other ranks get an error from NCCL, or when their timeout has passed. A thread
// watches over this (nccl_watch.h).
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/process.h"
#include "comm/nccl/nccl_library.h"
#include "comm/nccl/nccl_watch.h"

namespace ds::comm {

const char* nccl_type_name(nccl::DataType type);  // fp32
size_t nccl_type_bytes(nccl::DataType type);

struct NcclMember {
  std::string name;  // for messages
  int rank = 0;
  int size = 1;
  milliseconds timeout{30 * 60 * 1000};
  // Waits until the device has finished all work on streams; called before memory or a communicator is freed. False:
  // the process is ending, and nothing is freed. Any thread.
  std::function<bool()> quiesce;
  // Runs a function with the device of the communicator current, on the thread that calls this. Null: there is none to
  // choose.
  std::function<void(const std::function<void()>&)> on_device;
};

// Calls may come from any thread, one at a time; abort() at any time.
class NcclComm {
 public:
  // Collective over the ranks that have `id` from one of them. Binds the device of the member.
  static std::shared_ptr<NcclComm> join(NcclLibraryPtr library, const nccl::UniqueId& id, NcclMember member);
  ~NcclComm() { leave(); }
  NcclComm(const NcclComm&) = delete;

  int rank() const { return member_.rank; }
  int size() const { return member_.size; }
  const std::string& name() const { return member_.name; }
  const NcclMember& member() const { return member_; }
  const NcclLibraryPtr& library() const { return library_; }

  void all_reduce(const void* in, void* out, size_t count, nccl::DataType, nccl::RedOp, void* stream);
  void reduce(const void* in, void* out, size_t count, nccl::DataType, nccl::RedOp, int root, void* stream);
  void broadcast(const void* in, void* out, size_t count, nccl::DataType, int root, void* stream);
  void all_gather(const void* in, void* out, size_t count, nccl::DataType, void* stream);  // count: of one rank
  void reduce_scatter(const void* in, void* out, size_t count, nccl::DataType, nccl::RedOp, void* stream);  // likewise
  void send(const void* in, size_t count, nccl::DataType, int peer, void* stream);
  void recv(void* out, size_t count, nccl::DataType, int peer, void* stream);
  // in_counts[r] elements go to rank r, out_counts[r] come from it; packed one after the other on both sides.
  void all_to_all(const void* in, const std::vector<size_t>& in_counts, void* out,
                  const std::vector<size_t>& out_counts, nccl::DataType, void* stream);

  // The calls that `body` makes become one launch, and may depend on each other's peers in any order: sends and
  // receives between two ranks do not wait for each other. Groups nest. If `body` throws, the state of the other ranks
  // is unknown, and the communicator is aborted.
  void grouped(const std::function<void()>& body);

  // kType where this NCCL cannot reduce elements of `type`.
  void check_reduction(const char* what, nccl::DataType type) const;
  // Throws the errors that NCCL has found since the last call; asks it. Calls throw those that the thread has seen.
  void check();
  // Ends it at once; work on streams ends without a result. The first reason stays.
  void abort(const std::string& reason) noexcept;
  // Collective: finalizes the communicator. Idempotent. kRuntime if the other ranks do not call it in time.
  void close();
  // Ends it without the other ranks, after the work on the device. Idempotent.
  void leave() noexcept;
  bool closed() const;

  // For NcclRegistration. `bytes` of device memory, an allocation of its own as a rule.
  void* register_memory(void* data, size_t bytes);
  void deregister_memory(void* handle) noexcept;

 private:
  NcclComm(NcclLibraryPtr library, NcclMember member);
  template <typename Call>
  void run(const char* what, size_t count, nccl::DataType type, const Call& call);
  std::string numbered(const std::string& what);  // with the number of the next call
  void check_peer(const char* what, const char* role, int rank) const;
  nccl::DataType moved(nccl::DataType type) const;
  std::string who() const;
  void send_parts(const void* in, const std::vector<size_t>& counts, nccl::DataType, void* stream);
  void recv_parts(void* out, const std::vector<size_t>& counts, nccl::DataType, void* stream);

  const NcclLibraryPtr library_;
  const NcclMember member_;
  const OwningProcess owner_;
  std::recursive_mutex mutex_;
  NcclWatch watch_;
  int64_t calls_ = 0;  // number of the last call
  std::set<void*> registered_;
};
using NcclCommPtr = std::shared_ptr<NcclComm>;

}  // namespace ds::comm
