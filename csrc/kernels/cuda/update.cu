#include "kernels/cuda/update.cuh"

#include <cstring>

namespace ds::kernels::cuda {

std::vector<CudaUpdate>& updates() {
  static std::vector<CudaUpdate> all;
  return all;
}

const UpdateKernel* find_update(const char* name) {
  for (const CudaUpdate& one : updates())
    if (std::strcmp(one.name, name) == 0) return &one;
  return nullptr;
}

const char* update_name(size_t index) { return index < updates().size() ? updates()[index].name : nullptr; }

void update(const Launch& launch, const UpdateKernel& kernel, const UpdateSegment* segments, size_t count,
            const UpdateArgs& args, const StepScale* scale) {
  static_cast<const CudaUpdate&>(kernel).pass(launch, segments, count, args, scale);
}

}  // namespace ds::kernels::cuda
