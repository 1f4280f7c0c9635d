// The kernels of codes that a device has.
#pragma once
#include <c10/core/Device.h>

#include "kernels/codes.h"
#include "kernels/table.h"

namespace ds::zero {

// Codes made on the host, for a type of device that has no kernels for them: values are copied there and results
// back, on the current stream of the device that is current on the calling thread. Entries may wait for the stream;
// their errors are those of any_kernels().
const kernels::CodeKernels& any_codes(c10::DeviceType type);

// The code kernels of a device whose kernel table is `table`: those of its library; any_codes() where that has none or
// `table` is made of torch's operations; those that count alone where a step is planned.
const kernels::CodeKernels& codes_of(const c10::Device& device, const kernels::KernelTable& table);

}  // namespace ds::zero
