// The host's memory, pinned where that is asked for and can be had.
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <exception>
#include <mutex>

#include "base/ranges.h"
#include "storage/tier.h"

namespace ds::storage {
namespace {

class HostTier : public Tier {
 public:
  explicit HostTier(c10::Device device) : device_(device) {}

  std::unique_ptr<Part> open(const PartSpec& spec) override {
    const int64_t bytes = sum_of(spec.block_bytes);
    return std::make_unique<MemoryPart>(empty(bytes, spec.placement.pinned));
  }
  // Memory that a device often copies to and from.
  at::Tensor allocate(int64_t bytes) override { return empty(bytes, !device_.is_cpu()); }

  void report(Usage& usage) const override {
    const std::lock_guard guard(lock_);
    usage.unpinned_bytes = unpinned_bytes_;
    usage.unpinned_reason = reason_;
  }

 private:
  at::Tensor empty(int64_t bytes, bool pinned) {
    const auto options = at::TensorOptions().dtype(at::kByte).device(at::kCPU);
    if (pinned) {
      std::string reason;
      try {
        return at::empty({bytes}, options.pinned_memory(true));
      } catch (const c10::Error& error) {
        reason = error.what_without_backtrace();
      } catch (const std::exception& error) {
        reason = error.what();
      }
      const std::lock_guard guard(lock_);
      unpinned_bytes_ += bytes;
      if (reason_.empty()) reason_ = reason;
    }
    return at::empty({bytes}, options);
  }

  const c10::Device device_;
  mutable std::mutex lock_;
  int64_t unpinned_bytes_ = 0;
  std::string reason_;
};

std::unique_ptr<Tier> make_host_tier(const TierContext& context) { return std::make_unique<HostTier>(context.device); }
const TierRegistration host_registration("host", &make_host_tier);

}  // namespace
}  // namespace ds::storage
