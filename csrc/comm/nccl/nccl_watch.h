// The handle of an NCCL communicator, and a thread that watches over it.
//
// [Note: who ends a call]
// The communicator is NCCL's blocking kind: a launch is one call of the library, which returns when the work is on its
// stream, and waits inside the library where NCCL has to connect ranks first. Such a call can be ended by ncclCommAbort
// from another thread alone. The thread of this class does that when a call takes longer than the timeout, and abort()
// does it from whatever thread calls it. The thread also asks NCCL for errors that its own threads have found; a launch
// only looks whether an error was found. Within a group calls do not wait, and NCCL's list of the group names the
// communicator until the outermost group has ended: it is aborted there.
#pragma once
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/condition_variable.h"
#include "base/process.h"
#include "comm/nccl/nccl_library.h"

namespace ds::comm {

class NcclWatch {
 public:
  using Init = std::function<nccl::Result(nccl::Comm*)>;

  // `who`: the communicator in messages. `timeout`: of one call.
  NcclWatch(NcclLibraryPtr library, std::string who, milliseconds timeout);
  ~NcclWatch();  // the communicator was given away or has been aborted
  NcclWatch(const NcclWatch&) = delete;

  // Joins the communicator: `init` fills its argument and returns what NCCL says. kRuntime when that has taken longer
  // than the timeout: an initialisation cannot be aborted, so a thread of its own runs it and may stay in it.
  void join(Init init);

  // Makes a call of NCCL and throws its error, or the first error of the communicator. Any error aborts it. `what`: the
  // call that errors name until the next one; "": the one before.
  template <typename Call>
  void run(std::string what, const Call& call) {
    const nccl::Comm comm = enter(std::move(what));
    leave(call(comm));
  }
  // Calls in between belong to one group. end_group() throws the first error of the group.
  void begin_group();
  void end_group();
  void leave_group_with(const std::string& problem) noexcept;  // instead of end_group(): an exception is on its way
  bool in_group() const { return depth_ > 0; }                 // asked by the thread that makes calls

  // Throws the first error of the communicator. `ask`: asks NCCL now whether its threads have found one.
  void check(bool ask);
  void abort(const std::string& reason) noexcept;  // from any thread; the first reason stays
  void drop() noexcept;                            // aborts it without a reason, once no group is open
  nccl::Comm give_away();                          // null: there is none. No calls after it
  bool gone() const;

 private:
  void refuse() const;  // with the lock
  nccl::Comm enter(std::string what);
  void leave(nccl::Result result);
  void broken(const std::string& problem);  // with the lock
  void end(bool in_call) noexcept;          // with the lock
  std::string problem_now();                // with the lock: what NCCL's threads have found; "" if nothing
  std::string too_long() const;
  void watch();

  const NcclLibraryPtr library_;
  const std::string who_;
  const milliseconds timeout_;
  const OwningProcess owner_;
  mutable std::mutex mutex_;  // of what follows; not held during calls that may wait
  ConditionVariable stopped_;
  nccl::Comm comm_ = nullptr;
  std::string last_ = "joining", problem_;
  int depth_ = 0;               // of groups
  bool under_way_ = false;      // a call that may wait
  Clock::time_point deadline_;  // of it
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace ds::comm
