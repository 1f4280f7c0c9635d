// Kernels with pointers that tensors carry, and accesses of the host to memory that is closed to it: both are page
// faults.
#pragma once
#include <functional>

#include "streams.h"

namespace standin {

// Runs a kernel on this thread, alone. Its first access to a page opens the page until the kernel ends, and is
// recorded: the byte that it touched, as read or written.
void run_kernel(const OperationPtr& operation, c10::DeviceIndex device, const std::function<void()>& kernel);

void install_fault_handler();  // once more where somebody else has taken its place

}  // namespace standin
