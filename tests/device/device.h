// What torch asks of a kind of device.
#pragma once
#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

namespace standin {

const at::Generator& default_generator(c10::DeviceIndex device);

}  // namespace standin
