// Calls entries of a table of kernels that lies beside kernels/table.h (routes, attention) where a tensor is.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "base/error.h"
#include "base/thread_pool.h"
#include "comm/nccl/native_stream.h"
#include "kernels/launch.h"
#include "kernels/table.h"

namespace ds::bindings {

template <typename Table>
using TableOf = const Table* (*)(uint32_t abi, const char* device);

// call(table, launch), with the threads of `pool` on the CPU, elsewhere on the current stream of `t`'s device; without
// the interpreter's lock. Not called for tensors of the device meta, which have no values. Throws ErrorKind::kRuntime,
// named `what`, where there is no table or a kernel has failed.
template <typename Table, typename Call>
void call_kernels(const char* what, TableOf<Table> table_of, uint32_t abi, const at::Tensor& t, ThreadPool& pool,
                  const Call& call) {
  const at::Device device = t.device();
  if (device.is_meta()) return;
  const std::string type = c10::DeviceTypeName(device.type(), /*lower_case=*/true);
  const char* name = type.c_str();
  const Table* table = table_of(abi, name);
  if (table == nullptr) {
    const char* error = ds_kernels_error(kernels::kKernelAbi, name);
    fail(ErrorKind::kRuntime, what, " on ", device.str(), ": ",
         error != nullptr ? error : "the kernel library is of another build; build both again with `make`.");
  }
  kernels::Launch launch;
  if (device.is_cpu()) launch.pool = &pool;
  const c10::DeviceGuard guard(device);
  if (!device.is_cpu())
    launch.stream = comm::native_stream(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  pybind11::gil_scoped_release unlocked;
  call(*table, launch);
  if (device.is_cpu()) return;
  if (const char* error = ds_kernels(kernels::kKernelAbi, name)->last_error())
    fail(ErrorKind::kRuntime, what, " on ", device.str(), ": a kernel failed: ", error);
}

}  // namespace ds::bindings
