// Planes of tests: what they hold is the number of the element plus something.
#pragma once
#include <ATen/ops/arange.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "../io/folder.h"
#include "../test_device.h"
#include "base/error.h"
#include "storage/shard_storage.h"

namespace ds::storage {

constexpr Medium kMedia[] = {Medium::kDevice, Medium::kHost, Medium::kFile};

inline Placement at_rest(Medium medium, const std::string& folder = "", double share = 1.0) {
  Placement placement;
  placement.rest = medium;
  placement.pinned = !test_device().is_cpu();
  placement.folder = folder;
  placement.host_share = share;
  return placement;
}

inline void fill(at::Tensor data, float first) {
  if (data.numel() == 0) return;
  if (!data.device().is_cpu()) {  // queued
    at::arange_out(data, first, first + static_cast<float>(data.numel()), 1);
    return;
  }
  float* values = data.data_ptr<float>();
  for (int64_t i = 0; i < data.numel(); ++i) values[i] = first + static_cast<float>(i);
}

inline bool holds(const at::Tensor& data, float first) {
  const at::Tensor here = data.cpu();
  const float* values = here.data_ptr<float>();
  for (int64_t i = 0; i < data.numel(); ++i) {
    if (values[i] != first + static_cast<float>(i)) return false;
  }
  return true;
}

inline void write_plane(ShardStorage& storage, PlaneId plane, plan::Range range, float first) {
  fill(storage.acquire(plane, range, Access::kWrite, Medium::kHost).data(), first);
}

inline bool plane_holds(ShardStorage& storage, PlaneId plane, plan::Range range, float first,
                        Medium at = Medium::kHost) {
  return holds(storage.acquire(plane, range, Access::kRead, at).data(), first);
}

}  // namespace ds::storage
