// Functions that the library that stands in for NCCL has beside NCCL's interface, for a device that stands in for a GPU
// and for tests. They are found with dlsym; `Stream` is a cudaStream_t.
#pragma once
#include <cstddef>
#include <cstdint>

namespace fake_nccl {

struct Range {  // of memory that an operation reads or writes, as the caller of NCCL named it
  void* memory;
  size_t bytes;
  int written;
};

// A device with streams of its own. Without one an equal cudaStream_t is an equal queue, which a thread works off, each
// thread for which a communicator is joined is a device, and a call on the null stream returns when it has ended.
struct DeviceCalls {
  int (*current)();  // the device that is current in the calling thread
  // Calls run(operation) when the stream gets there, on any thread. The stream goes on when that has returned. The
  // operations of a device have ascending numbers.
  void (*queue)(void* stream, const Range* ranges, size_t count, void (*run)(void*), void* operation, int64_t number);
  void* (*reach)(void* memory);  // the address of memory of the device that its operations use
  void* (*stream)(void* given);  // the same for the same stream of the device, also where null names one
  // The numbers of operations, at most `most`, that have not ended and come before what is queued on the stream now,
  // also because it waits for other streams. Gives how many.
  size_t (*before)(void* stream, int64_t* numbers, size_t most);
};

}  // namespace fake_nccl

extern "C" {
// Null: none any more. Before the first communicator is made.
void fake_nccl_use_device(const fake_nccl::DeviceCalls* device);
// The device is about to grow its memory: returns when the operations that run on it now have ended, as cudaMalloc may.
void fake_nccl_memory_grows();
// The calling thread waits for the operations on the stream of the current device up to the one of that number, and for
// those that it has named before, until it says that it goes on. Circles of waits in which hosts take part are found by
// it.
void fake_nccl_host_waits(void* stream, int64_t last);
void fake_nccl_host_goes_on();

// For callers without a device: what is on the stream now has a number; wait() returns when all up to it has ended,
// with the first error of the stream, an ncclResult_t.
int64_t fake_nccl_record(void* stream);
int fake_nccl_ended(void* stream, int64_t number);  // 1 or 0, at once
int fake_nccl_wait(void* stream, int64_t number);

// The count of "alive", "memory" (both now); "created", "finalized", "destroyed", "aborted", "groups", "registrations",
// "deregistrations", "registrations lost", and names of functions (so far); "most running": on one device at once.
int64_t fake_nccl_count(const char* what);
void fake_nccl_fail(const char* function, int result);  // the next call of it
void fake_nccl_async_error(int result);  // as if the library's own threads had found it, in all communicators there are
void fake_nccl_hang(const char* function);  // its next call stays in the library until its communicator is aborted
void fake_nccl_give_up_joins();             // those that wait for other ranks fail, as NCCL's own do after a while
// The calling thread joins communicators for another one, whose number that has from the first function; 0: for itself.
int fake_nccl_this_thread();
void fake_nccl_act_as(int thread);
// The queues of all ranks when this process was told of the job's end; "" if it has not ended since the last reset.
const char* fake_nccl_report();
void fake_nccl_reset();
}
