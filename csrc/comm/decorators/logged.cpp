#include "comm/decorators/logged.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <thread>
#include <utility>

#include "base/ranges.h"

namespace ds::comm {

namespace {

// Records its calls when somebody has waited for them, or nobody will.
class LoggedWork : public Work {
 public:
  // `stream`: the current stream waits for the work, too.
  LoggedWork(CallLogPtr log, WorkPtr work, bool reduces, bool stream, std::vector<LoggedCall> calls)
      : log_(std::move(log)), work_(std::move(work)), reduces_(reduces), stream_(stream), calls_(std::move(calls)) {}
  ~LoggedWork() override { end(0); }

  void wait() override {
    const double begin = seconds_now();
    {
      const Blocked here(*log_, reduces_, stream_);
      work_->wait();
    }
    end(seconds_now() - begin);
  }
  bool ready() override { return work_->ready(); }
  bool ended() override { return work_->ended(); }

 private:
  void end(double blocked) {
    for (LoggedCall& call : std::exchange(calls_, {})) {
      call.end = seconds_now();
      call.blocked += blocked;
      log_->ended(call, /*waited=*/false);
    }
  }

  const CallLogPtr log_;
  const WorkPtr work_;
  const bool reduces_, stream_;
  std::vector<LoggedCall> calls_;
};

bool on_device(const Op& op) { return op.own().defined() && !op.own().is_cpu(); }

}  // namespace

bool asynchronous(c10::Device device) { return !device.is_cpu() && !device.is_meta(); }

void finish_device(c10::Device device) {
  if (!asynchronous(device)) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  c10::Event event(device.type());
  event.record(guard.getStream(device));
  while (!event.query()) std::this_thread::yield();
}

LoggedCall LoggedCommunicator::record_of(const Op& op, int64_t number, double begin) const {
  int64_t bytes = 0;
  op.visit_each([&](const Op& one) {
    bytes += static_cast<int64_t>((one.verb == Verb::kReduceScatter ? one.in : one.own()).nbytes());
  });
  const double now = seconds_now();
  const char* const name = op.logged_as ? op.logged_as : verb_name(op.verb);
  return {name, "engine", bytes, size(), "", op.tag, group_, number, begin, now, now - begin};
}

WorkPtr LoggedCommunicator::start(const Op& op) {
  const bool message = is_message(op.verb);
  const int64_t number = message ? -1 : collectives_++;
  if (!log_->on()) return inner_->run(op);
  const bool reduction = reduces(op.verb);
  const Blocked here(*log_, reduction);
  std::optional<CallScope> scope;
  if (log_->records()) scope.emplace(log_);
  const bool recorded = scope && scope->outermost() && op.verb != Verb::kBarrier;
  const bool needs_more = message && op.wait == Wait::kDetached;  // a rank may have to make another call before the end
  const bool waits = recorded && log_->waits() && !needs_more;
  if (waits) finish_device(op.own().device());  // so that earlier work of the device is not counted
  const double begin = seconds_now();
  WorkPtr work = inner_->run(op);
  std::vector<LoggedCall> calls;
  if (waits) {
    work->wait();
    finish_device(op.own().device());
    log_->ended(record_of(op, number, begin), /*waited=*/true);
    return std::make_shared<DoneWork>();
  }
  if (recorded) calls.push_back(record_of(op, number, begin));
  return std::make_shared<LoggedWork>(log_, std::move(work), reduction, on_device(op), std::move(calls));
}

// Its calls cannot wait for their ends one by one: a rank may have to make another call before.
WorkPtr LoggedCommunicator::run_all(const std::vector<Op>& ops) {
  if (!log_->on()) return inner_->run_all(ops);
  const Blocked here(*log_, /*reduces=*/false);
  const double begin = seconds_now();
  WorkPtr work = inner_->run_all(ops);
  std::vector<LoggedCall> calls;
  for (size_t i = 0; log_->records() && i < ops.size(); ++i) calls.push_back(record_of(ops[i], -1, begin));
  return std::make_shared<LoggedWork>(log_, std::move(work), /*reduces=*/false, any_of(ops, on_device),
                                      std::move(calls));
}

CommunicatorPtr logged(CommunicatorPtr inner, CallLogPtr log, std::string group) {
  if (!log || std::dynamic_pointer_cast<LoggedCommunicator>(inner)) return inner;
  return std::make_shared<LoggedCommunicator>(std::move(inner), std::move(log), std::move(group));
}

}  // namespace ds::comm
