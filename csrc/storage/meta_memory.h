// Bytes that tensors on the meta device, which have no memory, would take: every storage that is made while a count is
// installed counts from its allocation to its release, whoever makes it: the model, autograd, the engine, any thread.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "plan/place_plan.h"
#include "plan/step_plan.h"

namespace ds::storage {

// The bytes of each owner at one moment.
using OwnedBytes = std::map<std::string, int64_t>;

class MetaMemory {
 public:
  // `block`: sizes are rounded up to it, as allocators of devices do.
  explicit MetaMemory(int64_t block = 1);
  ~MetaMemory();
  MetaMemory(const MetaMemory&) = delete;

  // Storages of meta tensors are made by this count from install() to remove(). Installed counts nest: remove() brings
  // the earlier allocator back. Addresses are unique and cannot be accessed.
  void install();
  void remove() noexcept;
  // The count that is installed; null: there is none.
  static MetaMemory* installed();

  // Owner of storages that never count: the memory of the host.
  static constexpr const char* kOfHost = "host";

  // Storages that this thread makes from now on belong to it; "": they count once adopt() has given them an owner.
  // Returns the earlier owner.
  std::string set_owner(std::string owner);
  // The storage of `tensor`, if this count made it for no owner, belongs to `owner`.
  void adopt(const at::Tensor& tensor, const std::string& owner);
  // Where the step is: peaks are kept for each moment.
  void set_moment(std::string moment);

  int64_t live() const;
  OwnedBytes owned() const;                         // now
  std::map<std::string, OwnedBytes> peaks() const;  // of each moment, when most was alive there
  int64_t peak() const;                             // the most since the last reset_peak()
  void reset_peak();                                // of all moments

  // Of the machine whose steps are planned on meta tensors, and the clock of a step; null: nothing takes time.
  plan::PlaceRates rates;
  std::shared_ptr<plan::StepPlan> clock;
  // A kernel that torch does not see would have read and written so many bytes of the device.
  void touched(size_t bytes);

 private:
  struct Count;
  class Maker;

  std::shared_ptr<Count> count_;
  std::unique_ptr<Maker> maker_;
};

// Storages made by this thread's caller in the scope belong to `owner`, where a count is installed.
class MetaOwner {
 public:
  explicit MetaOwner(std::string owner)
      : memory_(MetaMemory::installed()), before_(memory_ ? memory_->set_owner(std::move(owner)) : "") {}
  ~MetaOwner() {
    if (memory_) memory_->set_owner(before_);
  }
  MetaOwner(const MetaOwner&) = delete;

 private:
  MetaMemory* const memory_;
  const std::string before_;
};

}  // namespace ds::storage
