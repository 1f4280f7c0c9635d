// Waits for other threads, which may need what the waiting thread holds: the lock of an interpreter.
#pragma once
#include <functional>
#include <mutex>

namespace ds {

using BlockingRegion = void (*)(const std::function<void()>& wait);

// The function by which a thread gives up the interpreter's lock while it waits. The bindings set it when they are
// loaded; in a program without an interpreter nothing is set, and a wait is only a wait.
void set_blocking_region(BlockingRegion region);

// Runs `wait` without the interpreter's lock, whether or not the caller has it.
void in_blocking_region(const std::function<void()>& wait);

// Locks a mutex whose holders create or free tensors. The end of a tensor that Python has seen takes the interpreter's
// lock, and so may the beginning of one (a TorchDispatchMode). A caller that has that lock must therefore give it up
// while another thread has the mutex.
std::unique_lock<std::mutex> locked(std::mutex& mutex);

}  // namespace ds
