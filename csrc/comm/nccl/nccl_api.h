// The part of NCCL's published C interface that is used here, declared anew: nothing is included or linked, so the tree
// builds without CUDA, and one build serves every NCCL from 2.14 on. Numbers and layouts are NCCL's ABI.
#pragma once
#include <climits>
#include <cstddef>

namespace ds::comm::nccl {

constexpr size_t kUniqueIdBytes = 128;

struct UniqueId {  // travels by value
  char bytes[kUniqueIdBytes] = {};
};

struct CommOpaque;
using Comm = CommOpaque*;
using Stream = void*;  // cudaStream_t

enum Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

enum DataType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
  kFloat8E4M3 = 10,  // from 2.24 on
  kFloat8E5M2 = 11,
};

enum RedOp : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };

// The configuration of a communicator as 2.17 laid it out. The library reads `size` bytes and believes fields as far
// as `version` had them: it says 2.14, where `blocking` was the only one.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 1;                // see [Note: who ends a call] in nccl_watch.h
  int cga_cluster_size = INT_MIN;  // "not said", as in all that follow
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};

// Functions that every NCCL from 2.14 on has.
struct Calls {
  Result (*get_version)(int*) = nullptr;
  Result (*get_unique_id)(UniqueId*) = nullptr;
  const char* (*get_error_string)(Result) = nullptr;
  const char* (*get_last_error)(Comm) = nullptr;
  Result (*comm_init_rank_config)(Comm*, int size, UniqueId, int rank, Config*) = nullptr;
  Result (*comm_get_async_error)(Comm, Result*) = nullptr;
  Result (*comm_finalize)(Comm) = nullptr;
  Result (*comm_destroy)(Comm) = nullptr;
  Result (*comm_abort)(Comm) = nullptr;
  Result (*group_start)() = nullptr;
  Result (*group_end)() = nullptr;
  Result (*all_reduce)(const void*, void*, size_t count, DataType, RedOp, Comm, Stream) = nullptr;
  Result (*broadcast)(const void*, void*, size_t count, DataType, int root, Comm, Stream) = nullptr;
  Result (*reduce)(const void*, void*, size_t count, DataType, RedOp, int root, Comm, Stream) = nullptr;
  Result (*all_gather)(const void*, void*, size_t send_count, DataType, Comm, Stream) = nullptr;
  Result (*reduce_scatter)(const void*, void*, size_t recv_count, DataType, RedOp, Comm, Stream) = nullptr;
  Result (*send)(const void*, size_t count, DataType, int peer, Comm, Stream) = nullptr;
  Result (*recv)(void*, size_t count, DataType, int peer, Comm, Stream) = nullptr;
};

// User buffers: from 2.19 on.
struct BufferCalls {
  Result (*mem_alloc)(void**, size_t) = nullptr;
  Result (*mem_free)(void*) = nullptr;
  Result (*comm_register)(Comm, void*, size_t, void** handle) = nullptr;
  Result (*comm_deregister)(Comm, void* handle) = nullptr;
};

}  // namespace ds::comm::nccl
