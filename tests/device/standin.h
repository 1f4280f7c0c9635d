// The functions of libstandin.so for C++ tests, other test libraries and Python (ctypes). Streams are what
// getStreamNativeHandle() gives, or c10::Stream::id() of a stream of the current device; null is its current stream.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {

// Queues a kernel with pointers that tensors carry. What it touches is found out while it runs.
// Gives null, or what is wrong with the launch.
const char* standin_launch(void* stream, const char* name, void (*kernel)(void*), void* context);
// A failure in a library at work: the next wait of the host for the stream throws it.
void standin_fail(const char* what);

void standin_choose(uint64_t seed, int lazy);
// For audits: call `number` of a kind from now on does nothing, as if it had been forgotten; 0: none; -1: none, and
// standin_place() knows all.
enum StandinWait { kStandinStreamWait, kStandinKeptMemory, kStandinHostWait };
void standin_leave_out(enum StandinWait kind, int number);
int standin_waits(enum StandinWait kind);                      // calls since then
const char* standin_place(enum StandinWait kind, int number);  // the stack of a call that was left out or listed
void standin_limit(int device, size_t bytes);
void standin_figures(int device, uint64_t* five);  // allocated and its peak, reserved and its peak, the limit
void standin_new_peaks(int device);
void standin_empty_cache();
// The library that stands in for NCCL queues its operations on the stand-in's streams from now on. Gives null, or why
// the library at `path` cannot.
const char* standin_use_nccl(const char* path);
// Faults found so far: their number, and the text of one, or null. `clear` forgets them.
int standin_faults(int clear);
const char* standin_fault(int index);
void standin_end();

}  // extern "C"
