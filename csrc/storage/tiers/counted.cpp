#include "storage/tiers/counted.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>
#include <string>
#include <utility>

#include "base/ranges.h"
#include "storage/meta_memory.h"

namespace ds::storage {
namespace {

// Not seen by modes of Python: a tensor that they have seen has an object of Python, which threads of the storage could
// not release while they hold its lock.
at::Tensor counted(int64_t bytes, std::string owner) {
  const MetaOwner scope(std::move(owner));
  const c10::impl::ExcludeDispatchKeyGuard unseen(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  return at::empty({bytes}, at::TensorOptions().device(at::kMeta).dtype(at::kByte));
}

class CountedMemory : public Tier {
 public:
  explicit CountedMemory(Medium medium) : counts_(medium == Medium::kDevice) {}
  std::unique_ptr<Part> open(const PartSpec& spec) override {
    return std::make_unique<MemoryPart>(counted(sum_of(spec.block_bytes), counts_ ? spec.plane : MetaMemory::kOfHost));
  }
  at::Tensor allocate(int64_t bytes) override { return counted(bytes, counts_ ? "scratch" : MetaMemory::kOfHost); }

 private:
  const bool counts_;
};

class CountedPart : public Part {
 public:
  bool any_address() const override { return true; }
  void read(size_t, char*) override {}
  void write(size_t, char*) override {}
};

class CountedFiles : public Tier {
 public:
  std::unique_ptr<Part> open(const PartSpec&) override { return std::make_unique<CountedPart>(); }
};

}  // namespace

Tiers counted_tiers(size_t count) {
  Tiers tiers;
  for (size_t i = 0; i < count; ++i) {
    const auto medium = static_cast<Medium>(i);
    if (medium == Medium::kDevice || medium == Medium::kHost)
      tiers.push_back(std::make_unique<CountedMemory>(medium));
    else
      tiers.push_back(std::make_unique<CountedFiles>());
  }
  return tiers;
}

}  // namespace ds::storage
