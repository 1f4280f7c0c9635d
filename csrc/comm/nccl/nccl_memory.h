// User buffers of NCCL: device memory that a communicator knows beforehand, so that collectives need no copies into its
// own buffers (NVLink SHARP, direct peer access). Every rank registers its part; only then it is of use.
#pragma once
#include <memory>

#include "comm/nccl/nccl_comm.h"

namespace ds::comm {

// Registers memory of somebody else, which must outlive this. The communicator may go first.
class NcclRegistration {
 public:
  NcclRegistration(const NcclCommPtr& communicator, void* data, size_t bytes);
  ~NcclRegistration() { release(); }
  NcclRegistration(const NcclRegistration&) = delete;
  void release();  // idempotent; waits for the device

 private:
  std::weak_ptr<NcclComm> communicator_;
  std::function<bool()> quiesce_;
  void* handle_;
};

// Device memory from ncclMemAlloc, on the device that is current, registered with one communicator. What the device
// does ends before the memory goes, whether the communicator is still there or not.
class NcclBuffer {
 public:
  NcclBuffer(const NcclCommPtr& communicator, size_t bytes);
  ~NcclBuffer();
  NcclBuffer(const NcclBuffer&) = delete;
  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  NcclLibraryPtr library_;
  std::function<bool()> quiesce_;
  void* data_ = nullptr;
  size_t bytes_;
  std::unique_ptr<NcclRegistration> registration_;
};

}  // namespace ds::comm
