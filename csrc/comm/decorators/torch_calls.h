// Calls that scripts and torch's own C++ code make on groups of torch.distributed, for the log of the process.
#pragma once
#include <cstdint>

#include "comm/decorators/call_log.h"

namespace ds::comm {

// While it exists, collectives of torch's groups are written into `log` under the names of the functions of
// torch.distributed, by torch's own observers of operators. Each waits for its end where a listener of the log wants
// that; otherwise its time ends when torch tells of the end. Sends and receives are not logged: a rank may have to make
// another call before they can end. One for each process, else kRuntime.
class TorchCalls {
 public:
  explicit TorchCalls(CallLogPtr log);
  ~TorchCalls();
  TorchCalls(const TorchCalls&) = delete;

 private:
  uint64_t handle_;
};

}  // namespace ds::comm
