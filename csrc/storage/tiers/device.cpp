// The memory of the device that computes.
#include <ATen/ops/empty.h>

#include "base/ranges.h"
#include "storage/tier.h"

namespace ds::storage {
namespace {

class DeviceTier : public Tier {
 public:
  explicit DeviceTier(c10::Device device) : device_(device) {}

  std::unique_ptr<Part> open(const PartSpec& spec) override {
    const int64_t bytes = sum_of(spec.block_bytes);
    return std::make_unique<MemoryPart>(allocate(bytes));
  }
  at::Tensor allocate(int64_t bytes) override {
    return at::empty({bytes}, at::TensorOptions().device(device_).dtype(at::kByte));
  }

 private:
  const c10::Device device_;
};

std::unique_ptr<Tier> make_device_tier(const TierContext& context) {
  return std::make_unique<DeviceTier>(context.device);
}
const TierRegistration device_registration("device", &make_device_tier);

}  // namespace
}  // namespace ds::storage
