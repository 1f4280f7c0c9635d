// Entries of tables that work on the current device of a type: functions of the device, made entries of a table whose
// errors are those of the calling thread.
#pragma once
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <exception>
#include <string>
#include <utility>

#include "kernels/launch.h"

namespace ds::zero::any {

using kernels::Launch;

// The next last_error() of this thread's any_kernels().
void note_failure(std::string what);

// Neither autograd nor autocast sees what a kernel does.
struct Unobserved {
  at::AutoDispatchBelowADInplaceOrView no_grad;
  c10::impl::ExcludeDispatchKeyGuard no_cast{c10::autocast_dispatch_keyset};
};

// The tensor of `n` elements at an address. The device is given: torch can ask the driver of CUDA alone where an
// address is.
at::Tensor array_at(const void* data, at::ScalarType type, int64_t n, const c10::Device& device);

// The entry of a table: `kFunction` on the current device of a type. Entry::call notes what kFunction throws.
template <c10::DeviceType kType, auto kFunction>
struct Entry;
template <c10::DeviceType kType, typename... Args, void (*kFunction)(const c10::Device&, const Launch&, Args...)>
struct Entry<kType, kFunction> {
  static void call(const Launch& launch, Args... args) {
    try {
      const Unobserved unobserved;
      kFunction(c10::impl::VirtualGuardImpl(kType).getDevice(), launch, args...);
    } catch (const c10::Error& error) {
      note_failure(error.what_without_backtrace());
    } catch (const std::exception& error) {
      note_failure(error.what());
    }
  }
};

}  // namespace ds::zero::any
