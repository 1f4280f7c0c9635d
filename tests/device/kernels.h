// Kernels with pointers that tensors carry, and accesses of the host to memory that is closed to it: both are page
// faults.
#pragma once
#include <functional>

#include "streams.h"

namespace standin {

// Runs a kernel on this thread, alone. Its first access to a page opens the page until the kernel ends, and is
// recorded: the byte that it touched, as read or written.
void run_kernel(const OperationPtr& operation, c10::DeviceIndex device, const std::function<void()>& kernel);

// Records the bytes that the kernel on this thread has used, in place of its page faults; for kernels that know them.
// `of_host`: memory of the host that it has written and that is not pinned; no device reaches that.
void kernel_used(std::vector<Access> accesses, const void* of_host);

void install_fault_handler();  // once more where somebody else has taken its place

}  // namespace standin
