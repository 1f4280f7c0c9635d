#include "comm/nccl/nccl_watch.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <memory>
#include <sstream>
#include <utility>

#include "base/error.h"

namespace ds::comm {

namespace {

constexpr milliseconds kLook{100};  // between two looks of the thread

// A join that may outlive who waits for it.
struct Joining {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false, unwanted = false;
  nccl::Comm comm = nullptr;
  nccl::Result result = nccl::kSuccess;
  std::exception_ptr error;
};

}  // namespace

NcclWatch::NcclWatch(NcclLibraryPtr library, std::string who, milliseconds timeout)
    : library_(std::move(library)), who_(std::move(who)), timeout_(timeout) {}

NcclWatch::~NcclWatch() {
  if (!thread_.joinable()) return;
  if (!owner_.here()) {
    thread_.detach();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stopped_.notify_all();
  thread_.join();
}

void NcclWatch::join(Init init) {
  const auto joining = std::make_shared<Joining>();
  std::thread([joining, init = std::move(init), library = library_] {
    nccl::Comm made = nullptr;
    nccl::Result result = nccl::kInternalError;
    std::exception_ptr error;  // of a device that does not exist
    try {
      result = init(&made);
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(joining->mutex);
    joining->comm = made;
    joining->result = result;
    joining->error = error;
    joining->done = true;
    joining->changed.notify_all();
    if (joining->unwanted && result == nccl::kSuccess) library->calls().comm_abort(made);
  }).detach();
  std::unique_lock joined(joining->mutex);
  joining->changed.wait_for(joined, timeout_, [&] { return joining->done; });
  joining->unwanted = !joining->done;
  if (joining->error) std::rethrow_exception(joining->error);
  const std::lock_guard lock(mutex_);
  if (!joining->done || joining->result != nccl::kSuccess) {
    broken(joining->done ? library_->explain(joining->result) : too_long());
    fail(ErrorKind::kRuntime, problem_);
  }
  comm_ = joining->comm;
  thread_ = std::thread([this] { watch(); });
}

// ---- calls
// ------------------------------------------------------------------------------------------------------------

nccl::Comm NcclWatch::enter(std::string what) {
  const std::lock_guard lock(mutex_);
  refuse();
  if (!what.empty()) last_ = std::move(what);
  under_way_ = depth_ == 0;
  deadline_ = Clock::now() + timeout_;
  return comm_;
}

void NcclWatch::leave(nccl::Result result) {
  const std::lock_guard lock(mutex_);
  under_way_ = false;
  if (problem_.empty() && result != nccl::kSuccess) broken(library_->explain(result, comm_));
  if (!problem_.empty()) fail(ErrorKind::kRuntime, problem_);
}

void NcclWatch::begin_group() {
  check(false);
  const nccl::Result result = library_->calls().group_start();
  const std::lock_guard lock(mutex_);
  if (result != nccl::kSuccess) {
    broken(library_->explain(result, comm_));
    fail(ErrorKind::kRuntime, problem_);
  }
  ++depth_;
}

void NcclWatch::end_group() {
  {
    const std::lock_guard lock(mutex_);
    under_way_ = depth_ == 1 && problem_.empty();
    deadline_ = Clock::now() + timeout_;
  }
  const nccl::Result result = library_->calls().group_end();
  const std::lock_guard lock(mutex_);
  --depth_;
  under_way_ = false;
  if (problem_.empty() && result != nccl::kSuccess) broken(library_->explain(result, comm_));
  if (problem_.empty()) return;
  end(false);
  fail(ErrorKind::kRuntime, problem_);
}

void NcclWatch::leave_group_with(const std::string& problem) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (problem_.empty()) problem_ = who_ + " was aborted: a group of calls was left with an error: " + problem;
  }
  library_->calls().group_end();
  const std::lock_guard lock(mutex_);
  --depth_;
  end(false);
}

// ---- errors and the end
// -----------------------------------------------------------------------------------------------

void NcclWatch::refuse() const {
  if (!problem_.empty()) fail(ErrorKind::kRuntime, problem_);
  if (!comm_) fail(ErrorKind::kRuntime, who_, " is closed: make another one.");
}

void NcclWatch::check(bool ask) {
  const std::lock_guard lock(mutex_);
  refuse();
  if (!ask || depth_ > 0) return;
  if (const std::string found = problem_now(); !found.empty()) broken(found);
  refuse();
}

std::string NcclWatch::problem_now() {
  nccl::Result state = nccl::kSuccess;
  const nccl::Result asked = library_->calls().comm_get_async_error(comm_, &state);
  if (asked != nccl::kSuccess) return library_->explain(asked, comm_);
  return state == nccl::kSuccess || state == nccl::kInProgress ? "" : library_->explain(state, comm_);
}

std::string NcclWatch::too_long() const {
  std::ostringstream text;
  text << "it has not come about within " << std::chrono::duration<double>(timeout_).count()
       << " s: another rank has not come, or is at another call";
  return text.str();
}

void NcclWatch::broken(const std::string& problem) {
  if (problem_.empty())
    problem_ = who_ + ": " + last_ + " failed: " + problem + ". " + library_->described() +
               ". The communicator is aborted; NCCL_DEBUG=WARN in the environment of all ranks makes NCCL say more.";
  end(under_way_);
}

void NcclWatch::end(bool in_call) noexcept {
  if (depth_ > 0 && !in_call) return;  // the end of the group does it
  if (comm_) library_->calls().comm_abort(std::exchange(comm_, nullptr));
}

void NcclWatch::abort(const std::string& reason) noexcept {
  const std::lock_guard lock(mutex_);
  if (!comm_) return;
  if (under_way_) return broken("it was aborted by another thread: " + reason);
  if (problem_.empty()) problem_ = who_ + " was aborted: " + reason;
  end(false);
}

void NcclWatch::drop() noexcept {
  const std::lock_guard lock(mutex_);
  end(false);
}

nccl::Comm NcclWatch::give_away() {
  const std::lock_guard lock(mutex_);
  return std::exchange(comm_, nullptr);
}

bool NcclWatch::gone() const {
  const std::lock_guard lock(mutex_);
  return comm_ == nullptr;
}

void NcclWatch::watch() {
  std::unique_lock lock(mutex_);
  for (;;) {
    const auto look = Clock::now() + kLook;
    stopped_.wait_until(lock, under_way_ ? std::min(look, deadline_) : look);
    if (stop_ || !comm_) return;
    if (under_way_ && Clock::now() >= deadline_) {
      broken(too_long());
    } else if (problem_.empty()) {
      if (const std::string found = problem_now(); !found.empty()) broken(found);
    }
  }
}

}  // namespace ds::comm
