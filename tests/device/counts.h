// Counts of calls of the code under test that would go to CUDA or to torch's allocator, of all threads.
#pragma once
#include <cstdint>
#include <string>

namespace standin {

enum class Count {
  kOperations,   // of torch, without copies
  kKernels,      // launches with pointers
  kCollectives,  // of the library that stands in for NCCL
  kCopies,       // of tensors; bytes of them by direction:
  kBytesToDevice,
  kBytesToHost,
  kBytesOnDevice,
  kEvents,          // recorded
  kStreamWaits,     // of a stream for an event
  kHostWaits,       // for a stream, an event, the device or a copy
  kBlockingCopies,  // those of the host waits that are copies, numbers among them
  kPolls,           // questions whether an event has been reached that were answered with yes
  kAllocations,     // of memory of the device
  kReleases,
  kReservations,  // of them those for which the device's allocator has asked the device
  kKeptMemory,    // record_stream
  kNumber,
};

void count(Count what, uint64_t by = 1);
void count_host_wait(bool copies);  // keeps the stack, where somebody wants stacks
void count_copy(bool from_device, bool to_device, uint64_t bytes);

}  // namespace standin
