// The functions that a library of CUDA kernels on the CPU offers beside its tables, for tests and for a stand-in
// device.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {
// Takes one launch or copy: calls run(work) once, on any thread, after all that `stream` was given before, or returns
// what is wrong with the launch. That, and what `work` finds wrong later, are errors of the thread that launched
// (KernelTable::last_error).
using CudaOnCpuRunner = const char* (*)(void* stream, void (*run)(void* work), void* work);
// The runner of all launches from now on; null, the default: run(work) at once, so that memory may be the host's.
__attribute__((visibility("default"))) void ds_cuda_on_cpu_set_runner(CudaOnCpuRunner runner);
// For a runner: ends work that will not run.
__attribute__((visibility("default"))) void ds_cuda_on_cpu_drop(void* work);
// For a runner: visits the bytes that the last work of this thread has read and written; none with a sanitizer.
__attribute__((visibility("default"))) void ds_cuda_on_cpu_accesses(void (*visit)(void* context, const void* begin,
                                                                                  size_t bytes, bool writes),
                                                                    void* context);
// Seed of the random orders of threads and blocks (default 1), and in how many orders each launch is run and compared:
// 1 to 4, the default. With a sanitizer a launch runs once, in one of the four by the seed.
__attribute__((visibility("default"))) void ds_cuda_on_cpu_set_orders(uint64_t seed, int orders);
}
