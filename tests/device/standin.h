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

// Ways to put queued work off: by the seed; until somebody waits; or it does not run at all, so that a program takes
// the time of its host alone. In the last mode values are whatever is in memory, and nothing is checked. Small
// operations, by whose values programs decide, run in the call.
enum StandinMode { kStandinAtOnce, kStandinLazy, kStandinNull };
void standin_choose(uint64_t seed, int mode);
// Returns the name of count number `what` in counts.cpp, of calls since the last reset; null behind the last one.
// `stacks`: of each wait of the host from now on, too.
const char* standin_count_name(int what);
uint64_t standin_count(int what);
void standin_reset_counts(int stacks);
const char* standin_host_wait(int index);  // the stack of one, or null
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
// A graph records operations from begin on, until end. A replay queues them on the current stream.
void* standin_graph_begin();
void standin_graph_end();
int standin_graph_recording();
void standin_graph_replay(void* graph);
void standin_graph_free(void* graph);
void standin_end();

}  // extern "C"
