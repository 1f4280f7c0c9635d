// Our declarations of NCCL's interface against its own header, where there is one: numbers, layouts and signatures.
// All of it is checked while it compiles.
#include "comm/nccl/nccl_api.h"

#include <gtest/gtest.h>

#include <type_traits>

#ifdef DS_WITH_NCCL_HEADER
#include <nccl.h>

#include <cstddef>

namespace ds::comm::nccl {
namespace {

#define SAME_NUMBER(ours, theirs) static_assert(static_cast<int>(ours) == static_cast<int>(theirs), #theirs)
SAME_NUMBER(kSuccess, ncclSuccess);
SAME_NUMBER(kUnhandledCudaError, ncclUnhandledCudaError);
SAME_NUMBER(kSystemError, ncclSystemError);
SAME_NUMBER(kInternalError, ncclInternalError);
SAME_NUMBER(kInvalidArgument, ncclInvalidArgument);
SAME_NUMBER(kInvalidUsage, ncclInvalidUsage);
SAME_NUMBER(kRemoteError, ncclRemoteError);
SAME_NUMBER(kInProgress, ncclInProgress);
SAME_NUMBER(kInt8, ncclInt8);
SAME_NUMBER(kUint8, ncclUint8);
SAME_NUMBER(kInt32, ncclInt32);
SAME_NUMBER(kUint32, ncclUint32);
SAME_NUMBER(kInt64, ncclInt64);
SAME_NUMBER(kUint64, ncclUint64);
SAME_NUMBER(kFloat16, ncclFloat16);
SAME_NUMBER(kFloat32, ncclFloat32);
SAME_NUMBER(kFloat64, ncclFloat64);
SAME_NUMBER(kBfloat16, ncclBfloat16);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 24, 0)
SAME_NUMBER(kFloat8E4M3, ncclFloat8e4m3);
SAME_NUMBER(kFloat8E5M2, ncclFloat8e5m2);
#endif
SAME_NUMBER(kSum, ncclSum);
SAME_NUMBER(kProd, ncclProd);
SAME_NUMBER(kMax, ncclMax);
SAME_NUMBER(kMin, ncclMin);
SAME_NUMBER(kAvg, ncclAvg);

static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId) && alignof(UniqueId) == alignof(ncclUniqueId));

#define SAME_PLACE(ours, theirs) static_assert(offsetof(Config, ours) == offsetof(ncclConfig_t, theirs), #theirs)
SAME_PLACE(size, size);
SAME_PLACE(magic, magic);
SAME_PLACE(version, version);
SAME_PLACE(blocking, blocking);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 18, 0)
SAME_PLACE(cga_cluster_size, cgaClusterSize);
SAME_PLACE(min_ctas, minCTAs);
SAME_PLACE(max_ctas, maxCTAs);
SAME_PLACE(net_name, netName);
SAME_PLACE(split_share, splitShare);
#endif

// A signature of theirs in our names of types.
template <typename T>
struct Ours {
  using type = T;
};
template <typename T>
struct Ours<T*> {
  using type = typename Ours<T>::type*;
};
#define CALLED(theirs, ours) \
  template <>                \
  struct Ours<theirs> {      \
    using type = ours;       \
  }
CALLED(ncclComm_t, Comm);
CALLED(ncclResult_t, Result);
CALLED(ncclUniqueId, UniqueId);
CALLED(ncclConfig_t, Config);
CALLED(ncclDataType_t, DataType);
CALLED(ncclRedOp_t, RedOp);
CALLED(cudaStream_t, Stream);
template <typename R, typename... A>
struct Ours<R (*)(A...)> {
  using type = typename Ours<R>::type (*)(typename Ours<A>::type...);
};

#define SAME_CALL(calls, ours, theirs) \
  static_assert(std::is_same_v<decltype(calls::ours), Ours<decltype(&(theirs))>::type>, #theirs)
SAME_CALL(Calls, get_version, ncclGetVersion);
SAME_CALL(Calls, get_unique_id, ncclGetUniqueId);
SAME_CALL(Calls, get_error_string, ncclGetErrorString);
SAME_CALL(Calls, get_last_error, ncclGetLastError);
SAME_CALL(Calls, comm_init_rank_config, ncclCommInitRankConfig);
SAME_CALL(Calls, comm_get_async_error, ncclCommGetAsyncError);
SAME_CALL(Calls, comm_finalize, ncclCommFinalize);
SAME_CALL(Calls, comm_destroy, ncclCommDestroy);
SAME_CALL(Calls, comm_abort, ncclCommAbort);
SAME_CALL(Calls, group_start, ncclGroupStart);
SAME_CALL(Calls, group_end, ncclGroupEnd);
SAME_CALL(Calls, all_reduce, ncclAllReduce);
SAME_CALL(Calls, broadcast, ncclBroadcast);
SAME_CALL(Calls, reduce, ncclReduce);
SAME_CALL(Calls, all_gather, ncclAllGather);
SAME_CALL(Calls, reduce_scatter, ncclReduceScatter);
SAME_CALL(Calls, send, ncclSend);
SAME_CALL(Calls, recv, ncclRecv);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 19, 0)
SAME_CALL(BufferCalls, mem_alloc, ncclMemAlloc);
SAME_CALL(BufferCalls, mem_free, ncclMemFree);
SAME_CALL(BufferCalls, comm_register, ncclCommRegister);
SAME_CALL(BufferCalls, comm_deregister, ncclCommDeregister);
#endif

TEST(NcclApi, IsWhatTheHeaderSays) { SUCCEED() << "compiled against NCCL " << NCCL_VERSION_CODE; }

}  // namespace
}  // namespace ds::comm::nccl

#else

TEST(NcclApi, IsWhatTheHeaderSays) { GTEST_SKIP() << "no nccl.h with CUDA's headers beside it on this machine"; }

#endif
