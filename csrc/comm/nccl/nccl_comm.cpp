#include "comm/nccl/nccl_comm.h"

#include <utility>

#include "base/error.h"

namespace ds::comm {

namespace {

// NCCL 2.28.9 loses the last elements of some averages over one rank that are not in place (seen on an H200: 3 of
// 100,003 in fp32). A sum over one rank is the same value, and NCCL copies it.
nccl::RedOp reduction(nccl::RedOp op, int size) { return size == 1 && op == nccl::kAvg ? nccl::kSum : op; }

const char* at(const void* start, size_t bytes) { return static_cast<const char*>(start) + bytes; }

}  // namespace

const char* nccl_type_name(nccl::DataType type) {
  switch (type) {
    case nccl::kInt8: return "int8";
    case nccl::kUint8: return "uint8";
    case nccl::kInt32: return "int32";
    case nccl::kUint32: return "uint32";
    case nccl::kInt64: return "int64";
    case nccl::kUint64: return "uint64";
    case nccl::kFloat16: return "fp16";
    case nccl::kFloat32: return "fp32";
    case nccl::kFloat64: return "fp64";
    case nccl::kBfloat16: return "bf16";
    case nccl::kFloat8E4M3: return "fp8 (e4m3)";
    case nccl::kFloat8E5M2: return "fp8 (e5m2)";
  }
  return "unknown";
}

size_t nccl_type_bytes(nccl::DataType type) {
  switch (type) {
    case nccl::kInt32:
    case nccl::kUint32:
    case nccl::kFloat32: return 4;
    case nccl::kInt64:
    case nccl::kUint64:
    case nccl::kFloat64: return 8;
    case nccl::kFloat16:
    case nccl::kBfloat16: return 2;
    default: return 1;
  }
}

// ---- coming and going -----------------------------------------------------------------------------------------------

namespace {

// NCCL communicator "world", rank 0 of 2
std::string described(const NcclMember& member) {
  return "NCCL communicator \"" + member.name + "\", rank " + std::to_string(member.rank) + " of " +
         std::to_string(member.size);
}

}  // namespace

NcclComm::NcclComm(NcclLibraryPtr library, NcclMember member)
    : library_(std::move(library)), member_(std::move(member)), watch_(library_, described(member_), member_.timeout) {}

std::shared_ptr<NcclComm> NcclComm::join(NcclLibraryPtr library, const nccl::UniqueId& id, NcclMember member) {
  if (member.size < 1 || member.rank < 0 || member.rank >= member.size)
    fail(ErrorKind::kValue, "there is no rank ", member.rank, " in an NCCL communicator of ", member.size, " ranks");
  std::shared_ptr<NcclComm> made(new NcclComm(std::move(library), std::move(member)));
  made->watch_.join([library = made->library_, id, rank = made->rank(), size = made->size(),
                     on_device = made->member_.on_device](nccl::Comm* comm) {
    nccl::Result result = nccl::kInternalError;
    const auto init = [&] {
      nccl::Config config;
      result = library->calls().comm_init_rank_config(comm, size, id, rank, &config);
    };
    on_device ? on_device(init) : init();
    return result;
  });
  return made;
}

void NcclComm::leave() noexcept {
  if (!owner_.here()) return;
  const std::lock_guard lock(mutex_);
  if (watch_.gone() || watch_.in_group()) return;
  try {
    if (member_.quiesce && !member_.quiesce()) return static_cast<void>(watch_.give_away());
  } catch (const std::exception&) {  // a device that cannot be waited for has nothing under way
  }
  registered_.clear();  // the communicator takes its registrations along
  watch_.drop();
}

void NcclComm::close() {
  const std::lock_guard lock(mutex_);
  if (watch_.gone()) return;
  if (watch_.in_group()) fail(ErrorKind::kRuntime, who(), " cannot be closed inside a group: leave the group first.");
  if (member_.quiesce && !member_.quiesce()) return static_cast<void>(watch_.give_away());
  watch_.run("taking leave", [&](nccl::Comm comm) {
    for (void* handle : std::exchange(registered_, {})) library_->buffer_calls().comm_deregister(comm, handle);
    return library_->calls().comm_finalize(comm);
  });
  const nccl::Comm comm = watch_.give_away();
  const nccl::Result result = comm ? library_->calls().comm_destroy(comm) : nccl::kSuccess;
  if (result != nccl::kSuccess)
    fail(ErrorKind::kRuntime, who(), " could not be destroyed: ", library_->explain(result), ". ",
         library_->described());
}

bool NcclComm::closed() const { return watch_.gone(); }

void NcclComm::abort(const std::string& reason) noexcept { watch_.abort(reason); }

// ---- errors
// -----------------------------------------------------------------------------------------------------------

std::string NcclComm::who() const { return described(member_); }

void NcclComm::check() {
  const std::lock_guard lock(mutex_);
  watch_.check(/*ask=*/true);
}

template <typename Call>
void NcclComm::run(const char* what, size_t count, nccl::DataType type, const Call& call) {
  const std::lock_guard lock(mutex_);
  if (count == 0) return watch_.check(/*ask=*/false);
  watch_.run(numbered(std::string(what) + " of " + std::to_string(count) + " x " + nccl_type_name(type)),
             [&](nccl::Comm comm) { return call(library_->calls(), comm); });
}

std::string NcclComm::numbered(const std::string& what) { return what + ", its call " + std::to_string(++calls_); }

void NcclComm::check_peer(const char* what, const char* role, int rank) const {
  if (rank < 0 || rank >= member_.size)
    fail(ErrorKind::kValue, who(), ": ", what, " got ", role, " ", rank, ", but ranks here are 0 to ", member_.size - 1,
         ". They are those of the communicator, not of the whole job.");
}

void NcclComm::check_reduction(const char* what, nccl::DataType type) const {
  if ((type == nccl::kFloat8E4M3 || type == nccl::kFloat8E5M2) && !library_->has_float8())
    fail(ErrorKind::kType, who(), ": ", what, " of ", nccl_type_name(type), " needs NCCL 2.24 or later, this is ",
         library_->described(), ". Reduce in bf16, or install a newer one. Moving fp8 works with every version.");
}

// The type for verbs without arithmetic: fp8 is sent as bytes, because an older NCCL does not know it.
nccl::DataType NcclComm::moved(nccl::DataType type) const {
  return type == nccl::kFloat8E4M3 || type == nccl::kFloat8E5M2 ? nccl::kUint8 : type;
}

// ---- collectives
// ------------------------------------------------------------------------------------------------------

void NcclComm::all_reduce(const void* in, void* out, size_t count, nccl::DataType type, nccl::RedOp op, void* stream) {
  check_reduction("all_reduce", type);
  op = reduction(op, size());
  run("all_reduce", count, type, [&](const nccl::Calls& calls, nccl::Comm comm) {
    return calls.all_reduce(in, out, count, type, op, comm, stream);
  });
}

void NcclComm::reduce(const void* in, void* out, size_t count, nccl::DataType type, nccl::RedOp op, int root,
                      void* stream) {
  check_reduction("reduce", type);
  op = reduction(op, size());
  check_peer("reduce", "the root", root);
  run("reduce", count, type, [&](const nccl::Calls& calls, nccl::Comm comm) {
    return calls.reduce(in, out, count, type, op, root, comm, stream);
  });
}

void NcclComm::broadcast(const void* in, void* out, size_t count, nccl::DataType type, int root, void* stream) {
  check_peer("broadcast", "the root", root);
  run("broadcast", count, type, [&](const nccl::Calls& calls, nccl::Comm comm) {
    return calls.broadcast(in, out, count, moved(type), root, comm, stream);
  });
}

void NcclComm::all_gather(const void* in, void* out, size_t count, nccl::DataType type, void* stream) {
  run("all_gather", count, type, [&](const nccl::Calls& calls, nccl::Comm comm) {
    return calls.all_gather(in, out, count, moved(type), comm, stream);
  });
}

void NcclComm::reduce_scatter(const void* in, void* out, size_t count, nccl::DataType type, nccl::RedOp op,
                              void* stream) {
  check_reduction("reduce_scatter", type);
  op = reduction(op, size());
  run("reduce_scatter", count, type, [&](const nccl::Calls& calls, nccl::Comm comm) {
    return calls.reduce_scatter(in, out, count, type, op, comm, stream);
  });
}

void NcclComm::send(const void* in, size_t count, nccl::DataType type, int peer, void* stream) {
  check_peer("send", "the receiver", peer);
  run("send", count, type, [&](const nccl::Calls& calls, nccl::Comm comm) {
    return calls.send(in, count, moved(type), peer, comm, stream);
  });
}

void NcclComm::recv(void* out, size_t count, nccl::DataType type, int peer, void* stream) {
  check_peer("recv", "the sender", peer);
  run("recv", count, type, [&](const nccl::Calls& calls, nccl::Comm comm) {
    return calls.recv(out, count, moved(type), peer, comm, stream);
  });
}

void NcclComm::send_parts(const void* in, const std::vector<size_t>& counts, nccl::DataType type, void* stream) {
  size_t begun = 0;
  for (int peer = 0; peer < member_.size; ++peer) {
    send(at(in, begun * nccl_type_bytes(type)), counts[peer], type, peer, stream);
    begun += counts[peer];
  }
}

void NcclComm::recv_parts(void* out, const std::vector<size_t>& counts, nccl::DataType type, void* stream) {
  size_t begun = 0;
  for (int peer = 0; peer < member_.size; ++peer) {
    recv(const_cast<char*>(at(out, begun * nccl_type_bytes(type))), counts[peer], type, peer, stream);
    begun += counts[peer];
  }
}

namespace {

void check_parts(const std::string& who, const char* what, const std::vector<size_t>& counts, int size) {
  if (counts.size() != static_cast<size_t>(size))
    fail(ErrorKind::kValue, who, ": ", what, " has ", counts.size(), " parts; there must be one for each of the ", size,
         " ranks.");
}

}  // namespace

void NcclComm::all_to_all(const void* in, const std::vector<size_t>& in_counts, void* out,
                          const std::vector<size_t>& out_counts, nccl::DataType type, void* stream) {
  check_parts(who(), "the input of all_to_all", in_counts, member_.size);
  check_parts(who(), "the output of all_to_all", out_counts, member_.size);
  grouped([&] {
    send_parts(in, in_counts, type, stream);
    recv_parts(out, out_counts, type, stream);
  });
}

void NcclComm::grouped(const std::function<void()>& body) {
  const std::lock_guard lock(mutex_);
  watch_.begin_group();
  try {
    body();
  } catch (const std::exception& error) {
    watch_.leave_group_with(error.what());
    throw;
  }
  watch_.end_group();
}

// ---- user buffers
// -----------------------------------------------------------------------------------------------------

void* NcclComm::register_memory(void* data, size_t bytes) {
  const nccl::BufferCalls& calls = library_->buffer_calls();
  const std::lock_guard lock(mutex_);
  void* handle = nullptr;
  watch_.run(numbered("registering " + std::to_string(bytes) + " bytes of memory"),
             [&](nccl::Comm comm) { return calls.comm_register(comm, data, bytes, &handle); });
  // NCCL gives no handle where registration would change nothing (NCCL_LOCAL_REGISTER=0).
  if (handle) registered_.insert(handle);
  return handle;
}

void NcclComm::deregister_memory(void* handle) noexcept {
  const std::lock_guard lock(mutex_);
  if (registered_.erase(handle) == 0 || watch_.gone()) return;
  try {
    watch_.run("", [&](nccl::Comm comm) { return library_->buffer_calls().comm_deregister(comm, handle); });
  } catch (const std::exception&) {  // an error of the communicator, which its next call tells
  }
}

}  // namespace ds::comm
