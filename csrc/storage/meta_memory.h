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
  // `block`: sizes are rounded up to it, as allocators of devices do. `on_host`: the steps are those of a device whose
  // memory is the host's.
  explicit MetaMemory(int64_t block = 1, bool on_host = false);
  ~MetaMemory();
  MetaMemory(const MetaMemory&) = delete;

  // Storages of meta tensors are made by this count from install() to remove(). Installed counts nest: remove() brings
  // the earlier allocator back. Addresses are unique and cannot be accessed.
  void install();
  void remove() noexcept;
  // The count that is installed; null: there is none.
  static MetaMemory* installed();

  // Owner of storages that never count: what they stand for is in the memory of the host or in files.
  static constexpr const char* kElsewhere = "elsewhere";

  // Storages that this thread makes from now on belong to it; "": they count once adopt() has given them an owner.
  // Returns the earlier owner.
  std::string set_owner(std::string owner);
  std::string owner() const;  // of this thread
  // The storage of `tensor`, if this count made it for no owner, belongs to `owner`.
  void adopt(const at::Tensor& tensor, const std::string& owner);
  // The storage of `tensor`, if this count made it, belongs to `owner` from now on, whoever had it.
  void give(const at::Tensor& tensor, const std::string& owner);
  // All that is alive and belongs to `from` belongs to `to` from now on.
  void give_all(const std::string& from, const std::string& to);
  // Names the moment of the step; peaks are kept for each moment.
  void set_moment(std::string moment);

  int64_t live() const;
  OwnedBytes owned() const;                         // now
  std::map<std::string, OwnedBytes> peaks() const;  // of each moment, when most was alive there
  int64_t peak() const;                             // the most since the last reset_peak()
  void reset_peak();                                // of all moments

  const bool on_host;

  // The rates of the machine whose steps are planned on meta tensors, and the clock of a step; null: nothing takes
  // time.
  plan::PlaceRates rates;
  std::shared_ptr<plan::StepPlan> clock;
  // Tells that a kernel that torch does not see would have read and written `bytes` bytes of the device.
  void kernel_ran(const char* name, size_t bytes);

 private:
  struct Block;
  struct Count;
  class Maker;
  Block* block_of(const at::Tensor& tensor) const;  // null: this count has not made it

  std::shared_ptr<Count> count_;
  std::unique_ptr<Maker> maker_;
};

// The clock of the step that is planned, where `device` is the one that it is planned for; null: the device is real, or
// nothing takes time. Code that makes the host wait for a real device, and need not for a planned one, tells it so.
plan::StepPlan* planned_clock(const c10::Device& device);

// Whether tensors of `device` are in the memory of the host, or are planned for it.
bool in_host_memory(const c10::Device& device);

// Whether the host computes what is asked of `device`: the CPU, and the meta device in a step that is planned for it.
bool computes_on_host(const c10::Device& device);

// Returns a tensor of `bytes` bytes on the meta device. It is hidden from modes of Python, because a tensor that they
// see gets a Python object, and threads of the storage could not release that object while they hold its lock.
at::Tensor meta_bytes(int64_t bytes);

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
