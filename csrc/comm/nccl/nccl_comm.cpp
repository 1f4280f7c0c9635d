#include "comm/nccl/nccl_comm.h"

#include <numeric>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/error.h"

namespace ds::comm {

namespace {

constexpr int kSpins = 100;
constexpr std::chrono::microseconds kNap{100};

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

NcclComm::NcclComm(NcclLibraryPtr library, NcclMember member)
    : library_(std::move(library)), member_(std::move(member)) {}

std::shared_ptr<NcclComm> NcclComm::join(NcclLibraryPtr library, const nccl::UniqueId& id, NcclMember member) {
  if (member.size < 1 || member.rank < 0 || member.rank >= member.size)
    fail(ErrorKind::kValue, "there is no rank ", member.rank, " in an NCCL communicator of ", member.size, " ranks");
  std::shared_ptr<NcclComm> made(new NcclComm(std::move(library), std::move(member)));
  nccl::Config config;
  made->settle(made->library_->calls().comm_init_rank_config(&made->comm_, made->size(), id, made->rank(), &config));
  return made;
}

void NcclComm::leave() noexcept {
  if (!owner_.here()) return;
  const std::lock_guard lock(mutex_);
  if (!comm_ || depth_ > 0) return;
  try {
    if (member_.quiesce && !member_.quiesce()) comm_ = nullptr;
  } catch (const std::exception&) {  // a device that cannot be waited for has nothing under way
  }
  drop();
}

void NcclComm::close() {
  const std::lock_guard lock(mutex_);
  if (!comm_) return;
  if (depth_ > 0) fail(ErrorKind::kRuntime, who(), " cannot be closed inside a group: leave the group first.");
  if (member_.quiesce && !member_.quiesce()) return static_cast<void>(comm_ = nullptr);
  last_ = "taking leave";
  for (void* handle : std::exchange(registered_, {})) library_->buffer_calls().comm_deregister(comm_, handle);
  settle(library_->calls().comm_finalize(comm_));
  const nccl::Result result = library_->calls().comm_destroy(std::exchange(comm_, nullptr));
  if (result != nccl::kSuccess && result != nccl::kInProgress)
    fail(ErrorKind::kRuntime, who(), " could not be destroyed: ", library_->explain(result), ". ",
         library_->described());
}

bool NcclComm::closed() const {
  const std::lock_guard lock(mutex_);
  return comm_ == nullptr;
}

void NcclComm::abort(const std::string& reason) {
  abort_asked_ = true;  // a thread that waits in settle() releases the lock
  const std::lock_guard lock(mutex_);
  if (comm_ && problem_.empty()) problem_ = who() + " was aborted: " + reason;
  drop();
}

void NcclComm::drop() noexcept {
  if (depth_ > 0) return;  // leave_group() does it
  registered_.clear();     // the communicator takes its registrations along
  if (comm_) library_->calls().comm_abort(std::exchange(comm_, nullptr));
}

// ---- errors
// -----------------------------------------------------------------------------------------------------------

std::string NcclComm::who() const {
  return "NCCL communicator \"" + member_.name + "\", rank " + std::to_string(member_.rank) + " of " +
         std::to_string(member_.size);
}

void NcclComm::broken(const std::string& problem) {
  if (problem_.empty())
    problem_ = who() + ": " + last_ + " failed: " + problem + ". " + library_->described() +
               ". The communicator is aborted; NCCL_DEBUG=WARN in the environment of all ranks makes NCCL say more.";
  drop();
  fail(ErrorKind::kRuntime, problem_);
}

void NcclComm::settle(nccl::Result result) {
  const auto deadline = Clock::now() + member_.timeout;
  for (int turn = 0; result == nccl::kInProgress; ++turn) {
    if (abort_asked_) broken("it was aborted by another thread");
    if (turn > 0 && Clock::now() > deadline) {
      const double seconds = std::chrono::duration<double>(member_.timeout).count();
      std::ostringstream text;
      text << "it has not come about within " << seconds << " s: another rank has not come, or is at another call";
      broken(text.str());
    }
    if (turn < kSpins)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(kNap);
    nccl::Result state = nccl::kSuccess;
    const nccl::Result asked = library_->calls().comm_get_async_error(comm_, &state);
    result = asked == nccl::kSuccess ? state : asked;
  }
  if (result != nccl::kSuccess) broken(library_->explain(result, comm_));
}

void NcclComm::check() {
  const std::lock_guard lock(mutex_);
  if (!problem_.empty()) fail(ErrorKind::kRuntime, problem_);
  if (!comm_) fail(ErrorKind::kRuntime, who(), " is closed: make another one.");
  if (depth_ > 0) return;  // asked when the group began
  nccl::Result state = nccl::kSuccess;
  const nccl::Result asked = library_->calls().comm_get_async_error(comm_, &state);
  if (asked != nccl::kSuccess) broken(library_->explain(asked, comm_));
  settle(state);
}

void NcclComm::start(const std::string& what) {
  check();
  last_ = what + ", its call " + std::to_string(++calls_);
}

template <typename Call>
void NcclComm::run(const char* what, size_t count, nccl::DataType type, const Call& call) {
  const std::lock_guard lock(mutex_);
  if (count == 0) return check();
  start(std::string(what) + " of " + std::to_string(count) + " x " + nccl_type_name(type));
  const nccl::Result result = call(library_->calls());
  if (depth_ > 0 && result == nccl::kInProgress) return;  // the end of the group settles it
  settle(result);
}

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
  run("all_reduce", count, type,
      [&](const nccl::Calls& calls) { return calls.all_reduce(in, out, count, type, op, comm_, stream); });
}

void NcclComm::reduce(const void* in, void* out, size_t count, nccl::DataType type, nccl::RedOp op, int root,
                      void* stream) {
  check_reduction("reduce", type);
  op = reduction(op, size());
  check_peer("reduce", "the root", root);
  run("reduce", count, type,
      [&](const nccl::Calls& calls) { return calls.reduce(in, out, count, type, op, root, comm_, stream); });
}

void NcclComm::broadcast(const void* in, void* out, size_t count, nccl::DataType type, int root, void* stream) {
  check_peer("broadcast", "the root", root);
  run("broadcast", count, type,
      [&](const nccl::Calls& calls) { return calls.broadcast(in, out, count, moved(type), root, comm_, stream); });
}

void NcclComm::all_gather(const void* in, void* out, size_t count, nccl::DataType type, void* stream) {
  run("all_gather", count, type,
      [&](const nccl::Calls& calls) { return calls.all_gather(in, out, count, moved(type), comm_, stream); });
}

void NcclComm::reduce_scatter(const void* in, void* out, size_t count, nccl::DataType type, nccl::RedOp op,
                              void* stream) {
  check_reduction("reduce_scatter", type);
  op = reduction(op, size());
  run("reduce_scatter", count, type,
      [&](const nccl::Calls& calls) { return calls.reduce_scatter(in, out, count, type, op, comm_, stream); });
}

void NcclComm::send(const void* in, size_t count, nccl::DataType type, int peer, void* stream) {
  check_peer("send", "the receiver", peer);
  run("send", count, type,
      [&](const nccl::Calls& calls) { return calls.send(in, count, moved(type), peer, comm_, stream); });
}

void NcclComm::recv(void* out, size_t count, nccl::DataType type, int peer, void* stream) {
  check_peer("recv", "the sender", peer);
  run("recv", count, type,
      [&](const nccl::Calls& calls) { return calls.recv(out, count, moved(type), peer, comm_, stream); });
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
  check();
  const nccl::Calls& calls = library_->calls();
  settle(calls.group_start());
  ++depth_;
  try {
    body();
  } catch (const std::exception& error) {
    if (problem_.empty()) problem_ = who() + " was aborted: a group of calls was left with an error: " + error.what();
    leave_group();
    throw;
  }
  const nccl::Result result = leave_group();
  if (!problem_.empty()) fail(ErrorKind::kRuntime, problem_);
  if (depth_ == 0 || result != nccl::kInProgress) settle(result);
}

// NCCL's list of what a group holds names the communicator until the outermost group has ended: only then may it go.
nccl::Result NcclComm::leave_group() noexcept {
  const nccl::Result result = library_->calls().group_end();
  --depth_;
  if (!problem_.empty()) drop();
  return result;
}

// ---- user buffers
// -----------------------------------------------------------------------------------------------------

void* NcclComm::register_memory(void* data, size_t bytes) {
  const nccl::BufferCalls& calls = library_->buffer_calls();
  const std::lock_guard lock(mutex_);
  start("registering " + std::to_string(bytes) + " bytes of memory");
  void* handle = nullptr;
  settle(calls.comm_register(comm_, data, bytes, &handle));
  // NCCL gives no handle where registration would change nothing (NCCL_LOCAL_REGISTER=0).
  if (handle) registered_.insert(handle);
  return handle;
}

void NcclComm::deregister_memory(void* handle) noexcept {
  const std::lock_guard lock(mutex_);
  if (registered_.erase(handle) > 0 && comm_) library_->buffer_calls().comm_deregister(comm_, handle);
}

}  // namespace ds::comm
