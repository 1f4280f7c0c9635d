#include "comm/decorators/torch_calls.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "comm/c10d_compat.h"
#include "comm/decorators/logged.h"

namespace ds::comm {

namespace {

struct TorchOp {
  const char* observed;               // the operator's name
  const char* name;                   // of the function of torch.distributed
  int passed;                         // the input that counts as what a rank passes; -1: none
  const char* replaced_by = nullptr;  // an operator: where torch has it, both names are seen for one call
};

constexpr TorchOp kOps[] = {
    {"c10d::allreduce_", "all_reduce", 0},
    {"c10d::allreduce_coalesced_", "all_reduce_coalesced", 0},
    {"c10d::broadcast_", "broadcast", 0},
    {"c10d::reduce_", "reduce", 0},
    {"c10d::allgather_", "all_gather", 1},
    {"c10d::_allgather_base_", "all_gather_into_tensor", 1},
    {"c10d::allgather_coalesced_", "all_gather_coalesced", 1},
    {"c10d::allgather_into_tensor_coalesced_", "all_gather_coalesced", 1},
    {"c10d::reduce_scatter_", "reduce_scatter", 1},
    {"c10d::_reduce_scatter_base_", "reduce_scatter_tensor", 1},
    {"c10d::reduce_scatter_tensor_coalesced_", "reduce_scatter_tensor", 1},
    {"c10d::gather_", "gather", 1},
    {"c10d::scatter_", "scatter", 0},
    {"c10d::alltoall_", "all_to_all", 1},
    {"c10d::alltoall_base_", "all_to_all_single", 1},
    {"gloo:all_to_all", "all_to_all_single", 0, "c10d::alltoall_base_"},  // torch 1.13 has no operator
    {"c10d::barrier", "barrier", -1},
};

// torch's observers are plain functions without an argument for their owner.
struct Listening {
  std::mutex mutex;
  CallLogPtr log;
  TorchCalls::Numbered numbered;
};
Listening& listening() {
  static Listening only;
  return only;
}

// A call between its beginning and its end.
struct Observed : at::ObserverContext {
  Observed(CallLogPtr kept, const TorchOp& what) : log(kept), scope(std::move(kept)), op(what) {}
  const CallLogPtr log;
  const CallScope scope;
  const TorchOp& op;
  LoggedCall call;
  std::optional<c10::Device> device;
  bool waits = false;
};

void add_bytes(const c10::IValue& value, Observed& into) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) return;
    into.call.bytes += static_cast<int64_t>(tensor.numel() * tensor.element_size());
    if (!into.device) into.device = tensor.device();
  } else if (value.isList()) {
    for (const c10::IValue& each : value.toListRef()) add_bytes(each, into);
  }
}

bool is_operator(const char* name) { return c10::Dispatcher::singleton().findSchema({name, ""}).has_value(); }

bool is_a(const c10::IValue& value, const char* name) {
  return value.isObject() && value.type()->str().find(name) != std::string::npos;
}

std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction& function) {
  const std::string name = function.name();
  const auto* known =
      std::find_if(std::begin(kOps), std::end(kOps), [&](const TorchOp& op) { return name == op.observed; });
  if (known == std::end(kOps) || (known->replaced_by && is_operator(known->replaced_by))) return nullptr;
  CallLogPtr log;
  TorchCalls::Numbered numbered;
  {
    const std::lock_guard lock(listening().mutex);
    log = listening().log;
    numbered = listening().numbered;
  }
  if (!log || !log->records()) return nullptr;
  auto made = std::make_unique<Observed>(log, *known);
  if (!made->scope.outermost()) return made;
  made->call.op = known->name;
  made->call.caller = log->caller();
  const auto inputs = function.inputs();
  if (known->passed >= 0 && known->passed < static_cast<int>(inputs.size())) add_bytes(inputs[known->passed], *made);
  for (const c10::IValue& each : inputs)
    if (is_a(each, "c10d.ProcessGroup")) {
      const TorchCalls::Group group = each.toCustomClass<c10d::ProcessGroup>();
      made->call.ranks = group->getSize();
      std::tie(made->call.group, made->call.number) = numbered(group);
    }
  made->waits = log->waits();
  if (made->waits && made->device) finish_device(*made->device);
  made->call.begin = seconds_now();
  return made;
}

void ends(const at::RecordFunction& function, at::ObserverContext* context) {
  auto* observed = static_cast<Observed*>(context);
  if (!observed || !observed->scope.outermost()) return;
  c10::intrusive_ptr<c10d::Work> work;
  for (const c10::IValue& each : function.outputs())
    if (is_a(each, "c10d.Work")) work = each.toCustomClass<c10d::Work>();
  auto finish = [log = observed->log, call = observed->call](bool waited) mutable {
    call.end = seconds_now();
    call.blocked = waited ? call.end - call.begin : 0;
    log->ended(call, waited);
  };
  try {
    if (observed->waits) {
      if (work) work->wait();
      if (observed->device) finish_device(*observed->device);
    } else if (work) {  // a thread of torch's tells of the end
      work->getFuture()->addCallback([finish](c10::ivalue::Future&) mutable { finish(false); });
      return;
    }
  } catch (const std::exception&) {  // the script gets this error from its own wait
    return;
  }
  finish(observed->waits);
}

}  // namespace

TorchCalls::TorchCalls(CallLogPtr log, Numbered numbered) {
  {
    const std::lock_guard lock(listening().mutex);
    if (listening().log) fail(ErrorKind::kRuntime, "calls of torch.distributed go to another log already");
    listening().log = std::move(log);
    listening().numbered = std::move(numbered);
  }
  handle_ = at::addGlobalCallback(at::RecordFunctionCallback(begins, ends)
                                      .needsInputs(true)
                                      .needsOutputs(true)
                                      .scopes({at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE}));
}

TorchCalls::~TorchCalls() {
  at::removeCallback(handle_);
  const std::lock_guard lock(listening().mutex);
  listening().log.reset();
  listening().numbered = nullptr;
}

}  // namespace ds::comm
