// The stream of transfers in the background.
#pragma once
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

#include "storage/fence.h"

namespace ds::storage {

// A stream beside the one that computes, for as long as a job runs.
class SideStream {
 public:
  explicit SideStream(c10::Device device) {
    if (!done_on_return(device))
      guard_.emplace(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
  }

 private:
  std::optional<c10::StreamGuard> guard_;
};

}  // namespace ds::storage
