// Kernels for the devices that no kernel library was written for: the entries of kernels/table.h, made of operations of
// torch. Every device that torch knows can so train with the engine.
#pragma once
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>

#include "kernels/table.h"

namespace ds::zero {

// The table of a type of device. Differences from kernels/table.h: entries work on the device that is current on the
// calling thread, on its current stream, which must be Launch::stream; memory that they need is Launch::scratch, or
// torch's where that is null; sums (sum_squares, column_sums, those of a rule) are added up in torch's order, so that
// their last bits may differ from other bodies'; finish_norm and update wait for the stream, because they read a number
// from the device; entries can fail on the CPU, too; random
// rounding, and rules for which it has no formula, are done on the host.
const kernels::KernelTable& any_kernels(c10::DeviceType type);

const kernels::KernelTable& cpu_library();  // throws where DS_FORCE_ISA is wrong

// The kernels of a device: those of its library, else any_kernels(); also that where the environment variable
// DS_DEVICE_BODY is "any". Throws where the device, its library or the variable cannot be used.
const kernels::KernelTable& kernels_of(const c10::Device& device);

// The most that sum_squares and update ask of Launch::scratch for `numel` elements in all; 0 for the table of a
// library, which asks for what kernels/table.h says.
size_t scratch_bytes(const kernels::KernelTable& table, const c10::Device& device, int threads, int64_t numel);

}  // namespace ds::zero
