#include "storage/tiers/counted.h"

#include <memory>
#include <string>
#include <utility>

#include "base/ranges.h"
#include "storage/meta_memory.h"

namespace ds::storage {
namespace {

at::Tensor counted(int64_t bytes, std::string owner) {
  const MetaOwner scope(std::move(owner));
  return meta_bytes(bytes);
}

class CountedMemory : public Tier {
 public:
  CountedMemory(Medium medium, std::string scratch)
      : counts_(medium == Medium::kDevice), scratch_(std::move(scratch)) {}
  std::unique_ptr<Part> open(const PartSpec& spec) override {
    return std::make_unique<MemoryPart>(
        counted(sum_of(spec.block_bytes), counts_ ? spec.plane : MetaMemory::kElsewhere));
  }
  at::Tensor allocate(int64_t bytes) override { return counted(bytes, counts_ ? scratch_ : MetaMemory::kElsewhere); }

 private:
  const bool counts_;
  const std::string scratch_;
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

Tiers counted_tiers(size_t count, const std::string& scratch) {
  Tiers tiers;
  for (size_t i = 0; i < count; ++i) {
    const auto medium = static_cast<Medium>(i);
    if (medium == Medium::kDevice || medium == Medium::kHost)
      tiers.push_back(std::make_unique<CountedMemory>(medium, scratch));
    else
      tiers.push_back(std::make_unique<CountedFiles>());
  }
  return tiers;
}

}  // namespace ds::storage
