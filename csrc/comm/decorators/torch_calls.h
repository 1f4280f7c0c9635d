// Calls that scripts and torch's own C++ code make on groups of torch.distributed, for the log of the process.
#pragma once
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "comm/decorators/call_log.h"

namespace c10d {
class ProcessGroup;
}

namespace ds::comm {

// While it exists, collectives of torch's groups are written into `log` under the names of the functions of
// torch.distributed, by torch's own observers of operators. Each waits for its end where a listener of the log wants
// that; otherwise its time ends when torch tells of the end. Sends and receives are not logged: a rank may have to make
// another call before they can end. One for each process, else kRuntime.
class TorchCalls {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
  // Names a call that begins on a group: LoggedCall::group and LoggedCall::number.
  using Numbered = std::function<std::pair<std::string, int64_t>(const Group&)>;
  TorchCalls(CallLogPtr log, Numbered numbered);
  ~TorchCalls();
  TorchCalls(const TorchCalls&) = delete;

 private:
  uint64_t handle_;
};

}  // namespace ds::comm
