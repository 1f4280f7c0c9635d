// The direct NCCL wrapper over a library of ours with NCCL's interface (fake_nccl/): ranks are threads, memory is the
// host's. Every operation against plain loops; errors; that nothing is left behind.
#include "comm/nccl/nccl_comm.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "../on_threads.h"
#include "../error_of.h"
#include "../stand_in.h"
#include "base/error.h"
#include "comm/nccl/nccl_memory.h"
#include "fake_nccl_calls.h"

namespace ds::comm {
namespace {

using std::chrono::milliseconds;
const std::string kFake = stand_in("fake_nccl");

template <typename Function>
Function order(const char* name) {
  return reinterpret_cast<Function>(dlsym(dlopen(kFake.c_str(), RTLD_NOW), name));
}
int64_t count(const char* what) { return order<int64_t (*)(const char*)>("fake_nccl_count")(what); }
void fail_at(const char* function, int result) {
  order<void (*)(const char*, int)>("fake_nccl_fail")(function, result);
}
void fail_later(int result) { order<void (*)(int)>("fake_nccl_async_error")(result); }
void hang(const char* function) { order<void (*)(const char*)>("fake_nccl_hang")(function); }

bool comes_to(const char* what, int64_t wanted) {
  const auto end = Clock::now() + std::chrono::seconds(20);
  while (count(what) != wanted && Clock::now() < end) std::this_thread::sleep_for(milliseconds(5));
  return count(what) == wanted;
}

class Nccl : public testing::Test {
 protected:
  void SetUp() override {
    library = NcclLibrary::open(kFake);
    order<void (*)()>("fake_nccl_reset")();
  }
  void TearDown() override {
    EXPECT_EQ(count("alive"), 0);
    EXPECT_EQ(count("memory"), 0);
    unsetenv("DS_NCCL_LIBRARY");
  }

  NcclCommPtr join(const nccl::UniqueId& id, int rank, int size, milliseconds timeout = milliseconds(10000)) {
    NcclMember member;
    member.name = "world";
    member.rank = rank;
    member.size = size;
    member.timeout = timeout;
    member.quiesce = quiesce;
    member.on_device = as_this_thread();
    return NcclComm::join(library, id, member);
  }
  NcclCommPtr alone() { return join(library->make_id(), 0, 1); }

  template <typename Body>
  void on_ranks(int size, Body body) {
    const nccl::UniqueId id = library->make_id();
    on_threads(size, [&](int rank) {
      const NcclCommPtr comm = join(id, rank, size);
      body(rank, *comm);
      comm->close();
    });
  }

  NcclLibraryPtr library;
  std::function<bool()> quiesce;
};

void expect_parts(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_TRUE(says(text, part)) << part << " is missing in: " << text;
}

// Element i of rank r: small numbers that every type holds.
template <typename T>
T element(int rank, size_t i) {
  return static_cast<T>(1 + (rank * 3 + static_cast<int>(i)) % 5);
}
template <typename T>
std::vector<T> elements(int rank, size_t n, size_t from = 0) {
  std::vector<T> made(n);
  for (size_t i = 0; i < n; ++i) made[i] = element<T>(rank, from + i);
  return made;
}
template <typename T>
T reduced(int size, size_t i, nccl::RedOp op) {
  double total = element<T>(0, i);
  for (int rank = 1; rank < size; ++rank) {
    const double v = element<T>(rank, i);
    total = op == nccl::kProd  ? total * v
            : op == nccl::kMax ? std::max(total, v)
            : op == nccl::kMin ? std::min(total, v)
                               : total + v;
  }
  return static_cast<T>(op == nccl::kAvg ? total / size : total);
}

const size_t kSizes[] = {0, 1, 7, 1000};

template <typename T>
void sweep(int rank, NcclComm& comm, nccl::DataType type) {
  const int size = comm.size();
  const auto ranks = static_cast<size_t>(size);
  for (const size_t n : kSizes) {
    for (const nccl::RedOp op : {nccl::kSum, nccl::kProd, nccl::kMax, nccl::kMin, nccl::kAvg}) {
      std::vector<T> in = elements<T>(rank, n), out(n);
      comm.all_reduce(in.data(), out.data(), n, type, op, nullptr);
      for (size_t i = 0; i < n; ++i) ASSERT_EQ(out[i], (reduced<T>(size, i, op)));
      comm.all_reduce(in.data(), in.data(), n, type, op, nullptr);
      ASSERT_EQ(in, out);

      std::vector<T> at_root(n, T(77));
      in = elements<T>(rank, n);
      comm.reduce(in.data(), at_root.data(), n, type, op, size - 1, nullptr);
      ASSERT_EQ(at_root, rank == size - 1 ? out : std::vector<T>(n, T(77)));

      in = elements<T>(rank, n * ranks);
      comm.reduce_scatter(in.data(), out.data(), n, type, op, nullptr);
      for (size_t i = 0; i < n; ++i) ASSERT_EQ(out[i], (reduced<T>(size, static_cast<size_t>(rank) * n + i, op)));
    }
    std::vector<T> value = elements<T>(rank, n), all(n * ranks);
    comm.all_gather(value.data(), all.data(), n, type, nullptr);
    for (int r = 0; r < size; ++r)
      for (size_t i = 0; i < n; ++i) ASSERT_EQ(all[static_cast<size_t>(r) * n + i], (element<T>(r, i)));
    for (int root = 0; root < size; ++root) {
      value = elements<T>(rank, n);
      comm.broadcast(value.data(), value.data(), n, type, root, nullptr);
      ASSERT_EQ(value, elements<T>(root, n));
    }
  }
}

TEST_F(Nccl, EveryOperationOverSizesTypesAndRanks) {
  for (const int size : {1, 2, 3, 5})
    on_ranks(size, [](int rank, NcclComm& comm) {
      sweep<float>(rank, comm, nccl::kFloat32);
      sweep<double>(rank, comm, nccl::kFloat64);
      sweep<int64_t>(rank, comm, nccl::kInt64);
      sweep<int32_t>(rank, comm, nccl::kInt32);
      sweep<uint8_t>(rank, comm, nccl::kUint8);
    });
}

TEST_F(Nccl, SendReceiveAndUnevenAllToAll) {
  for (const int size : {1, 2, 4})
    on_ranks(size, [&](int rank, NcclComm& comm) {
      // A ring: everybody sends first, which only a group allows.
      const int next = (rank + 1) % size, last = (rank + size - 1) % size;
      std::vector<float> out = elements<float>(rank, 9), in(9);
      comm.grouped([&] {
        comm.send(out.data(), 9, nccl::kFloat32, next, nullptr);
        comm.recv(in.data(), 9, nccl::kFloat32, last, nullptr);
      });
      EXPECT_EQ(in, elements<float>(last, 9));

      // Rank r gives rank p 2r + p elements; nobody gives rank 0 anything if r is 0.
      std::vector<size_t> given, taken;
      std::vector<int32_t> mine, expected;
      for (int p = 0; p < size; ++p) {
        given.push_back(static_cast<size_t>(2 * rank + p));
        taken.push_back(static_cast<size_t>(2 * p + rank));
        for (int i = 0; i < 2 * rank + p; ++i) mine.push_back(100 * rank + 10 * p + i);
        for (int i = 0; i < 2 * p + rank; ++i) expected.push_back(100 * p + 10 * rank + i);
      }
      std::vector<int32_t> got(expected.size());
      comm.all_to_all(mine.data(), given, got.data(), taken, nccl::kInt32, nullptr);
      EXPECT_EQ(got, expected);
    });
}

TEST_F(Nccl, ManyCallsAreOneGroupAndGroupsNest) {
  const NcclCommPtr comm = alone();
  const int64_t before = count("groups");
  float values[3] = {1, 2, 3};
  comm->grouped([&] {
    for (float& value : values) comm->all_reduce(&value, &value, 1, nccl::kFloat32, nccl::kSum, nullptr);
    comm->all_to_all(values, {3}, values, {3}, nccl::kFloat32, nullptr);
  });
  EXPECT_EQ(count("groups"), before + 1);
  comm->close();
}

// Only the watching thread asks, a few times a second.
TEST_F(Nccl, LaunchesDoNotAskNcclForErrors) {
  const NcclCommPtr comm = alone();
  const auto begun = Clock::now();
  const int64_t before = count("ncclCommGetAsyncError");
  float value = 1;
  for (int call = 0; call < 1000; ++call) comm->all_reduce(&value, &value, 1, nccl::kFloat32, nccl::kSum, nullptr);
  const int64_t asked = count("ncclCommGetAsyncError") - before;
  EXPECT_LE(asked, 1 + std::chrono::duration_cast<milliseconds>(Clock::now() - begun).count() / 50);
  EXPECT_EQ(count("ncclAllReduce"), 1000);
  comm->close();
}

TEST_F(Nccl, MovesEightBitFloatsAndReducesThemWhereNcclDoes) {
  const NcclCommPtr comm = alone();
  uint8_t in = 0x3c, out = 0;
  comm->all_gather(&in, &out, 1, nccl::kFloat8E4M3, nullptr);
  EXPECT_EQ(out, in);
  library = NcclLibrary::open(stand_in("fake_nccl_old"));
  const NcclCommPtr old = alone();
  old->broadcast(&in, &in, 1, nccl::kFloat8E5M2, 0, nullptr);
  expect_parts(
      error_of(ErrorKind::kType, [&] { old->all_reduce(&in, &out, 1, nccl::kFloat8E5M2, nccl::kSum, nullptr); }),
      {"fp8 (e5m2)", "2.24 or later", "2.18.3", "libfake_nccl_old.so"});
  old->close();
  comm->close();
}

// ---- errors
// -----------------------------------------------------------------------------------------------------------

TEST_F(Nccl, WrongRanksAndPartsAreRefusedAndNothingBreaks) {
  const NcclCommPtr comm = alone();
  float value = 3;
  expect_parts(error_of(ErrorKind::kValue, [&] { comm->broadcast(&value, &value, 1, nccl::kFloat32, 1, nullptr); }),
               {"world", "broadcast", "the root 1", "0 to 0"});
  error_of(ErrorKind::kValue, [&] { comm->send(&value, 1, nccl::kFloat32, -1, nullptr); });
  expect_parts(error_of(ErrorKind::kValue,
                        [&] {
                          comm->all_to_all(&value, {1, 1}, &value, {1}, nccl::kFloat32, nullptr);
                        }),
               {"2 parts", "1 ranks"});
  comm->all_reduce(&value, &value, 1, nccl::kFloat32, nccl::kSum, nullptr);
  EXPECT_EQ(value, 3);
  comm->close();
  expect_parts(error_of(ErrorKind::kRuntime, [&] { comm->check(); }), {"closed"});
}

TEST_F(Nccl, AnErrorCodeNamesTheCallAndAbortsOnce) {
  const NcclCommPtr comm = alone();
  float value = 0;
  comm->all_reduce(&value, &value, 1, nccl::kFloat32, nccl::kSum, nullptr);
  fail_at("ncclAllReduce", nccl::kUnhandledCudaError);
  const auto call = [&] { comm->all_reduce(&value, &value, 1, nccl::kFloat32, nccl::kSum, nullptr); };
  const std::string text = error_of(ErrorKind::kRuntime, call);
  expect_parts(text, {"\"world\", rank 0 of 1", "all_reduce of 1 x fp32, its call 2", "unhandled cuda error (code 1)",
                      "told to fail in ncclAllReduce", "NCCL 2.28.9", "libfake_nccl.so", "NCCL_DEBUG"});
  EXPECT_EQ(count("aborted"), 1);
  EXPECT_EQ(error_of(ErrorKind::kRuntime, call), text);
  comm->close();
  EXPECT_TRUE(comm->closed());
  EXPECT_EQ(count("aborted"), 1);
  EXPECT_EQ(count("destroyed"), 0);
}

TEST_F(Nccl, AnErrorThatComesLaterNamesTheLastCallAndAborts) {
  const NcclCommPtr comm = alone();
  float value = 0;
  comm->all_gather(&value, &value, 1, nccl::kFloat32, nullptr);
  fail_later(nccl::kRemoteError);
  expect_parts(error_of(ErrorKind::kRuntime, [&] { comm->check(); }),
               {"all_gather of 1 x fp32", "remote process exited", "told to fail later"});
  EXPECT_EQ(count("aborted"), 1);
}

TEST_F(Nccl, TheWatchingThreadFindsALaterErrorAndAborts) {
  const NcclCommPtr comm = alone();
  float value = 0;
  comm->all_gather(&value, &value, 1, nccl::kFloat32, nullptr);
  fail_later(nccl::kRemoteError);
  EXPECT_TRUE(comes_to("aborted", 1));
  expect_parts(error_of(ErrorKind::kRuntime, [&] { comm->all_gather(&value, &value, 1, nccl::kFloat32, nullptr); }),
               {"all_gather of 1 x fp32, its call 1", "remote process exited", "told to fail later"});
}

TEST_F(Nccl, AnErrorInsideAGroupAbortsWhenTheGroupIsOver) {
  float value = 0;
  const auto add = [&](NcclComm& comm) { comm.all_reduce(&value, &value, 1, nccl::kFloat32, nccl::kSum, nullptr); };
  const NcclCommPtr left = alone();
  EXPECT_THROW(left->grouped([&] {
    left->grouped([&] {
      add(*left);
      throw std::runtime_error("the caller gave up");
    });
  }),
               std::runtime_error);
  expect_parts(error_of(ErrorKind::kRuntime, [&] { left->check(); }), {"left with an error", "the caller gave up"});
  const NcclCommPtr swallowed = alone();
  fail_at("ncclAllGather", nccl::kInvalidUsage);
  expect_parts(error_of(ErrorKind::kRuntime,
                        [&] {
                          swallowed->grouped([&] {
                            add(*swallowed);
                            try {
                              swallowed->all_gather(&value, &value, 1, nccl::kFloat32, nullptr);
                            } catch (const Error&) {
                            }
                          });
                        }),
               {"all_gather", "invalid usage"});
  const NcclCommPtr ended = alone();
  fail_at("ncclGroupEnd", nccl::kSystemError);
  expect_parts(error_of(ErrorKind::kRuntime, [&] { ended->grouped([&] { add(*ended); }); }), {"system error"});
  EXPECT_EQ(count("aborted"), 3);
  EXPECT_EQ(count("alive"), 0);
}

TEST_F(Nccl, ARankThatDoesNotComeIsNotWaitedForForEver) {
  expect_parts(error_of(ErrorKind::kRuntime, [&] { join(library->make_id(), 0, 2, milliseconds(50)); }),
               {"rank 0 of 2", "joining", "within 0.05 s", "another rank has not come"});
  EXPECT_EQ(count("aborted"), 0);  // an initialisation cannot be aborted
  order<void (*)()>("fake_nccl_give_up_joins")();
  EXPECT_TRUE(comes_to("alive", 0));
}

// The rank that nobody waits for any more leaves the communicator that is made in the end.
TEST_F(Nccl, ARankThatComesTooLateFindsNobody) {
  const nccl::UniqueId id = library->make_id();
  error_of(ErrorKind::kRuntime, [&] { join(id, 0, 2, milliseconds(50)); });
  const NcclCommPtr late = join(id, 1, 2);
  EXPECT_TRUE(comes_to("aborted", 1));
  float value = 0;
  error_of(ErrorKind::kRuntime, [&] { late->all_reduce(&value, &value, 1, nccl::kFloat32, nccl::kSum, nullptr); });
}

TEST_F(Nccl, ADeviceThatIsNotThereIsAnErrorOfTheJoin) {
  NcclMember member;
  member.on_device = [](const std::function<void()>&) { throw std::runtime_error("there is no such device"); };
  EXPECT_THROW(NcclComm::join(library, library->make_id(), member), std::runtime_error);
}

TEST_F(Nccl, ACallThatStaysInTheLibraryIsEndedByTheTimeout) {
  float value = 0;
  const auto add = [&](NcclComm& comm) { comm.all_reduce(&value, &value, 1, nccl::kFloat32, nccl::kSum, nullptr); };
  const NcclCommPtr comm = join(library->make_id(), 0, 1, milliseconds(150));
  add(*comm);
  hang("ncclAllReduce");
  const std::string text = error_of(ErrorKind::kRuntime, [&] { add(*comm); });
  expect_parts(text, {"all_reduce of 1 x fp32, its call 2", "within 0.15 s", "is at another call", "NCCL_DEBUG"});
  EXPECT_EQ(count("aborted"), 1);
  EXPECT_EQ(error_of(ErrorKind::kRuntime, [&] { add(*comm); }), text);

  const NcclCommPtr grouped = join(library->make_id(), 0, 1, milliseconds(150));
  hang("ncclGroupEnd");
  expect_parts(error_of(ErrorKind::kRuntime, [&] { grouped->grouped([&] { add(*grouped); }); }), {"within 0.15 s"});
  const NcclCommPtr closed = join(library->make_id(), 0, 1, milliseconds(150));
  hang("ncclCommFinalize");
  expect_parts(error_of(ErrorKind::kRuntime, [&] { closed->close(); }), {"taking leave", "within 0.15 s"});
  EXPECT_EQ(count("aborted"), 3);
}

TEST_F(Nccl, AbortFromAnotherThreadFreesWhoWaits) {
  const NcclCommPtr comm = alone();
  hang("ncclAllReduce");
  std::thread other([&] {
    std::this_thread::sleep_for(milliseconds(30));
    comm->abort("the test says so");
  });
  float value = 0;
  expect_parts(
      error_of(ErrorKind::kRuntime, [&] { comm->all_reduce(&value, &value, 1, nccl::kFloat32, nccl::kSum, nullptr); }),
      {"all_reduce of 1 x fp32", "aborted by another thread", "the test says so"});
  other.join();
  EXPECT_EQ(count("aborted"), 1);
}

TEST_F(Nccl, RanksThatDifferFailWithNcclsError) {
  const nccl::UniqueId id = library->make_id();
  std::atomic<int> failed{0};
  on_threads(2, [&](int rank) {
    const NcclCommPtr comm = join(id, rank, 2);
    std::vector<float> values(3);
    try {
      comm->all_reduce(values.data(), values.data(), rank == 0 ? 2 : 3, nccl::kFloat32, nccl::kSum, nullptr);
    } catch (const Error&) {
      ++failed;
    }
  });
  EXPECT_EQ(failed, 2);
}

// ---- what is alive
// ----------------------------------------------------------------------------------------------------

TEST_F(Nccl, LeavesNothingBehind) {
  std::atomic<int> quiet{0};
  quiesce = [&] { return ++quiet > 0; };
  alone()->close();
  EXPECT_EQ(count("finalized"), 1);
  EXPECT_EQ(count("destroyed"), 1);
  alone();  // dropped: what is on the device ends, the other ranks are not waited for
  EXPECT_EQ(count("aborted"), 1);
  EXPECT_EQ(count("created"), 2);
  EXPECT_EQ(quiet, 2);
}

TEST_F(Nccl, BuffersAreRegisteredAndGivenBackInAnyOrder) {
  std::atomic<int> quiet{0};
  quiesce = [&] { return ++quiet > 0; };
  NcclCommPtr comm = alone();
  {
    const NcclBuffer buffer(comm, 40);
    auto* values = static_cast<float*>(buffer.data());
    for (int i = 0; i < 10; ++i) values[i] = static_cast<float>(i);
    comm->all_reduce(values, values, 10, nccl::kFloat32, nccl::kSum, nullptr);
    EXPECT_EQ(values[9], 9);
    EXPECT_EQ(count("memory"), 1);
    EXPECT_EQ(count("registrations"), 1);
    EXPECT_EQ(quiet, 0);
  }
  EXPECT_GT(quiet, 0);
  EXPECT_EQ(count("memory"), 0);
  EXPECT_EQ(count("deregistrations"), 1);

  // The communicator goes first: it takes its registration along, the memory stays readable.
  float other[4];
  auto later = std::make_unique<NcclBuffer>(comm, 8);
  NcclRegistration theirs(comm, other, sizeof(other));
  comm->close();
  EXPECT_EQ(count("deregistrations"), 3);
  static_cast<float*>(later->data())[0] = 1;
  later.reset();
  theirs.release();
  EXPECT_EQ(count("memory"), 0);
  EXPECT_EQ(count("deregistrations"), 3);
  EXPECT_EQ(count("registrations lost"), 0);
}

TEST_F(Nccl, MemoryThatCannotBeHadIsAnError) {
  const NcclCommPtr comm = alone();
  fail_at("ncclMemAlloc", nccl::kUnhandledCudaError);
  expect_parts(error_of(ErrorKind::kRuntime, [&] { NcclBuffer(comm, 64); }), {"ncclMemAlloc of 64 bytes", "world"});
  fail_at("ncclCommRegister", nccl::kSystemError);
  error_of(ErrorKind::kRuntime, [&] { NcclBuffer(comm, 64); });
  EXPECT_EQ(count("memory"), 0);
}

// ---- the library
// ------------------------------------------------------------------------------------------------------

TEST_F(Nccl, FindsWhatTheEnvironmentOrTheCallerNames) {
  if (dlopen("libnccl.so.2", RTLD_NOLOAD | RTLD_NOW)) GTEST_SKIP() << "this process has an NCCL already";
  setenv("DS_NCCL_LIBRARY", kFake.c_str(), 1);
  EXPECT_EQ(NcclLibrary::find()->path(), kFake);
  setenv("DS_NCCL_LIBRARY", "", 1);
  const NcclLibraryPtr found = NcclLibrary::find({"/nowhere/libnccl.so.2", stand_in("fake_nccl_old")});
  EXPECT_EQ(found->version_text(), "2.18.3");
}

TEST_F(Nccl, ALibraryThatIsMissingIsAnErrorThatSaysWhatToDo) {
  setenv("DS_NCCL_LIBRARY", "/nowhere/libnccl.so.2", 1);
  if (!dlopen("libnccl.so.2", RTLD_NOLOAD | RTLD_NOW))
    expect_parts(error_of(ErrorKind::kRuntime, [] { NcclLibrary::find(); }),
                 {"/nowhere/libnccl.so.2", "No such file", "DS_NCCL_LIBRARY"});
}

TEST_F(Nccl, MissingFunctionsAreNamedWithPathAndVersion) {
  expect_parts(error_of(ErrorKind::kRuntime, [] { NcclLibrary::open(stand_in("fake_nccl_broken")); }),
               {"libfake_nccl_broken.so is NCCL 2.28.9 and has no ncclAllReduce", "2.14 or later", "install"});
  expect_parts(error_of(ErrorKind::kRuntime, [] { NcclLibrary::open("libc.so.6"); }), {"has no ncclGetVersion"});

  library = NcclLibrary::open(stand_in("fake_nccl_old"));
  EXPECT_FALSE(library->has_buffers());
  const NcclCommPtr comm = alone();
  expect_parts(error_of(ErrorKind::kRuntime, [&] { NcclBuffer(comm, 64); }),
               {"libfake_nccl_old.so", "2.18.3", "no ncclMemAlloc", "2.19 or later"});
  float value = 4;
  comm->all_reduce(&value, &value, 1, nccl::kFloat32, nccl::kSum, nullptr);  // goes on without buffers
  comm->close();
}

TEST_F(Nccl, AnIdThatCannotBeMadeIsAnError) {
  fail_at("ncclGetUniqueId", nccl::kSystemError);
  expect_parts(error_of(ErrorKind::kRuntime, [&] { library->make_id(); }), {"system error", "libfake_nccl.so"});
}

}  // namespace
}  // namespace ds::comm
