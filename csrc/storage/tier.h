// A kind of memory in which blocks of planes rest. A new one is a file that registers itself: docs/adding.md, "A memory
// tier".
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <memory>
#include <string>
#include <vector>

#include "io/files.h"
#include "storage/placement.h"
#include "storage/usage.h"

namespace ds::storage {

// A run of blocks of one plane, in one tier. Different blocks may be read and written by several threads at a time;
// whoever calls keeps readers and writers of one block apart.
class Part {
 public:
  virtual ~Part() = default;

  // All blocks one after the other, as bytes, where kernels can address them. Undefined: read and write are called.
  virtual at::Tensor memory() const { return {}; }

  // The whole of a block. `data` is host memory, aligned to io::kBlockBytes and as long as whole blocks of that size;
  // the bytes behind the block may be overwritten. They throw what went wrong, with a name and an offset.
  virtual void read(size_t block, char* data);
  virtual void write(size_t block, char* data);
};

struct PartSpec {
  std::string plane;
  std::vector<int64_t> block_bytes;
  Placement placement;
};

class Tier {
 public:
  virtual ~Tier() = default;

  // Room for the blocks; contents are whatever is there. Throws where there is none.
  virtual std::unique_ptr<Part> open(const PartSpec& spec) = 0;

  // Memory for leases and scratch; undefined where kernels cannot address this tier.
  virtual at::Tensor allocate(int64_t bytes) { return {}; }

  virtual void report(Usage& usage) const {}
};

struct TierContext {
  c10::Device device;
  std::shared_ptr<io::Files> files;
};
using TierFactory = std::unique_ptr<Tier> (*)(const TierContext& context);

// const TierRegistration registration("remote", &make_remote): every ShardStorage has the tier, and
// medium_named("remote") is its Medium. Before main only.
struct TierRegistration {
  TierRegistration(const char* name, TierFactory factory);
};

// Throws ErrorKind::kValue for a name that is not registered, with those that are.
Medium medium_named(const std::string& name);
std::string name_of(Medium medium);

// One of each, by Medium.
std::vector<std::unique_ptr<Tier>> make_tiers(const TierContext& context);

// Memory that is there: parts of the device and of the host.
class MemoryPart : public Part {
 public:
  explicit MemoryPart(at::Tensor memory) : memory_(std::move(memory)) {}
  at::Tensor memory() const override { return memory_; }

 private:
  at::Tensor memory_;
};

}  // namespace ds::storage
