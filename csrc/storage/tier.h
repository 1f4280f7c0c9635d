// A kind of memory in which blocks of planes rest. A new one is a file that registers itself: docs/adding.md, "A memory
// tier".
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <memory>
#include <string>
#include <vector>

#include "io/folders/run_folder.h"
#include "storage/file_access.h"
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
  // If `any_address`, the data may have any address, and nothing behind it is touched.
  virtual bool any_address() const { return false; }
  virtual void read(size_t block, char* data);
  virtual void write(size_t block, char* data);
  // If `reaches_device`: the same to and from byte `offset` of memory of a device, on which nothing is under way.
  virtual bool reaches_device() const { return false; }
  virtual void read_device(size_t block, const at::Tensor& memory, int64_t offset);
  virtual void write_device(size_t block, const at::Tensor& memory, int64_t offset);
  virtual void discard(size_t block) {}  // its contents are not needed any more
};

struct PartSpec {
  std::string plane;
  std::vector<int64_t> block_bytes;
  Placement placement;
  std::vector<std::string> block_files{};  // see PlaneExtras; of these blocks
  std::shared_ptr<io::RunFolder> folder{};
};

class Tier {
 public:
  virtual ~Tier() = default;

  // Room for the blocks; contents are whatever is there. Throws where there is none.
  virtual std::unique_ptr<Part> open(const PartSpec& spec) = 0;

  // Memory for leases and scratch; undefined where kernels cannot address this tier.
  virtual at::Tensor allocate(int64_t bytes) { return {}; }

  virtual void report(Usage& usage) const {}

  // The process ends with parts still open: what it would leave behind is removed now. They can be used until then.
  virtual void at_exit() noexcept {}
};

struct TierContext {
  c10::Device device;
  FileAccess files;
  std::string scratch;  // see Budget
};
using Tiers = std::vector<std::unique_ptr<Tier>>;  // by Medium
using TierFactory = std::unique_ptr<Tier> (*)(const TierContext& context);

// const TierRegistration registration("remote", &make_remote): every ShardStorage has the tier, and
// medium_named("remote") is its Medium. Before main only.
struct TierRegistration {
  TierRegistration(const char* name, TierFactory factory);
};

// Throws ErrorKind::kValue for a name that is not registered, with those that are.
Medium medium_named(const std::string& name);
std::string name_of(Medium medium);

// One of each.
Tiers make_tiers(const TierContext& context);

// Memory that is there: parts of the device and of the host.
class MemoryPart : public Part {
 public:
  explicit MemoryPart(at::Tensor memory) : memory_(std::move(memory)) {}
  at::Tensor memory() const override { return memory_; }

 private:
  at::Tensor memory_;
};

}  // namespace ds::storage
