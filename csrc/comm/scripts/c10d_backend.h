// A Communicator as a backend of torch.distributed, so that plain torch calls and DistributedDataParallel use it.
#pragma once
#include <string>

#include "comm/c10d_compat.h"
#include "comm/communicator.h"

namespace ds::comm {

using BackendPtr = c10::intrusive_ptr<compat::BackendBase>;

// Calls with dense tensors in host memory run over `communicator`. What it does not carry goes through `other`, gloo
// as a rule: sparse tensors, tensors of other devices. Null: such calls are refused. `name`:
// that of the backend.
BackendPtr c10d_backend(CommunicatorPtr communicator, BackendPtr other, std::string name);
// The communicator of such a backend; null: another one.
CommunicatorPtr communicator_of(const BackendPtr& backend);

}  // namespace ds::comm
