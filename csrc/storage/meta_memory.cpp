#include "storage/meta_memory.h"

#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <mutex>
#include <thread>
#include <unordered_set>
#include <utility>

#include "io/memory/aligned_pool.h"

namespace ds::storage {
namespace {

constexpr uint8_t kPriority = 1;                         // above torch's own allocator
constexpr uintptr_t kFirstAddress = uintptr_t{1} << 46;  // pages there belong to no process of Linux on 48 bits
constexpr size_t kAddressStep = 512;

}  // namespace

struct MetaMemory::Block {
  std::shared_ptr<Count> count;
  std::string owner;
  int64_t bytes;
};

struct MetaMemory::Count {
  const int64_t block;
  std::mutex mutex;  // graphs are released by whoever lets go of them
  uintptr_t next = kFirstAddress;
  std::map<std::thread::id, std::string> owners;
  std::string moment;
  std::unordered_set<Block*> blocks;  // that are alive
  OwnedBytes owned;
  int64_t live = 0, peak = 0;
  std::map<std::string, std::pair<int64_t, OwnedBytes>> peaks;

  explicit Count(int64_t given) : block(given) {}

  std::string& owner() { return owners.try_emplace(std::this_thread::get_id(), "other").first->second; }

  void add(const std::string& whose, int64_t bytes) {
    if (whose.empty() || whose == kElsewhere) return;
    owned[whose] += bytes;
    live += bytes;
    if (bytes > 0) note();
  }

  void note() {
    peak = std::max(peak, live);
    auto& [most, then] = peaks[moment];
    if (live <= most) return;
    most = live;
    then = owned;
  }

  void give(Block& block, const std::string& to) {
    add(block.owner, -block.bytes);
    block.owner = to;
    add(to, block.bytes);
  }
};

class MetaMemory::Maker : public c10::Allocator {
 public:
  Maker(MetaMemory& memory, std::shared_ptr<Count> count) : memory(memory), count_(std::move(count)) {}

  // One of the two functions allocate() is torch's, which is const in torch 1.
  c10::DataPtr allocate(size_t bytes) const { return made(bytes); }
  c10::DataPtr allocate(size_t bytes) { return made(bytes); }
  void copy_data(void*, const void*, size_t) const {}

  static void release(void* one) {
    const std::unique_ptr<Block> block(static_cast<Block*>(one));
    const std::lock_guard lock(block->count->mutex);
    block->count->blocks.erase(block.get());
    block->count->add(block->owner, -block->bytes);
  }

  MetaMemory& memory;
  c10::Allocator* before = nullptr;

 private:
  c10::DataPtr made(size_t bytes) const {
    const auto counted = static_cast<int64_t>(io::round_up(bytes, static_cast<size_t>(count_->block)));
    const std::lock_guard lock(count_->mutex);
    auto* block = new Block{count_, count_->owner(), counted};
    count_->blocks.insert(block);
    count_->add(block->owner, counted);
    auto* address = reinterpret_cast<void*>(count_->next);             // NOLINT(performance-no-int-to-ptr)
    count_->next += io::round_up(bytes, kAddressStep) + kAddressStep;  // neighbours would look like one piece of memory
    return {address, block, &release, c10::Device(c10::kMeta)};
  }

  const std::shared_ptr<Count> count_;
};

MetaMemory::MetaMemory(int64_t block, bool on_host)
    : on_host(on_host), count_(std::make_shared<Count>(block)), maker_(std::make_unique<Maker>(*this, count_)) {}
MetaMemory::~MetaMemory() { remove(); }

void MetaMemory::install() {
  if (maker_->before) return;
  maker_->before = c10::GetAllocator(c10::kMeta);
  c10::SetAllocator(c10::kMeta, maker_.get(), kPriority);
}

void MetaMemory::remove() noexcept {
  if (c10::Allocator* before = std::exchange(maker_->before, nullptr)) c10::SetAllocator(c10::kMeta, before, kPriority);
}

MetaMemory* MetaMemory::installed() {
  auto* maker = dynamic_cast<Maker*>(c10::GetAllocator(c10::kMeta));
  return maker ? &maker->memory : nullptr;
}

std::string MetaMemory::set_owner(std::string owner) {
  const std::lock_guard lock(count_->mutex);
  return std::exchange(count_->owner(), std::move(owner));
}

std::string MetaMemory::owner() const {
  const std::lock_guard lock(count_->mutex);
  return count_->owner();
}

MetaMemory::Block* MetaMemory::block_of(const at::Tensor& tensor) const {
  if (!tensor.is_meta() || !tensor.has_storage()) return nullptr;
  const c10::DataPtr& data = tensor.storage().data_ptr();
  if (data.get_deleter() != &Maker::release) return nullptr;
  auto* block = static_cast<Block*>(data.get_context());
  return block->count == count_ ? block : nullptr;
}

void MetaMemory::adopt(const at::Tensor& tensor, const std::string& owner) {
  Block* const block = block_of(tensor);
  if (block && block->owner.empty()) give(tensor, owner);
}

void MetaMemory::give(const at::Tensor& tensor, const std::string& owner) {
  Block* const block = block_of(tensor);
  if (!block) return;
  const std::lock_guard lock(count_->mutex);
  count_->give(*block, owner);
}

void MetaMemory::give_all(const std::string& from, const std::string& to) {
  const std::lock_guard lock(count_->mutex);
  for (Block* block : count_->blocks)
    if (block->owner == from) count_->give(*block, to);
}

void MetaMemory::set_moment(std::string moment) {
  const std::lock_guard lock(count_->mutex);
  count_->moment = std::move(moment);
  count_->note();
}

void MetaMemory::kernel_ran(const char* name, size_t bytes) {
  if (!clock) return;
  const double seconds = rates.device_step > 0 ? static_cast<double>(bytes) / rates.device_step : 0.0;
  clock->kernel(static_cast<int64_t>(1e9 * seconds), name);
}

int64_t MetaMemory::live() const {
  const std::lock_guard lock(count_->mutex);
  return count_->live;
}

OwnedBytes MetaMemory::owned() const {
  const std::lock_guard lock(count_->mutex);
  return count_->owned;
}

std::map<std::string, OwnedBytes> MetaMemory::peaks() const {
  const std::lock_guard lock(count_->mutex);
  std::map<std::string, OwnedBytes> found;
  for (const auto& [moment, most] : count_->peaks) found[moment] = most.second;
  return found;
}

int64_t MetaMemory::peak() const {
  const std::lock_guard lock(count_->mutex);
  return count_->peak;
}

void MetaMemory::reset_peak() {
  const std::lock_guard lock(count_->mutex);
  count_->peak = count_->live;
  count_->peaks.clear();
  count_->peaks[count_->moment] = {count_->live, count_->owned};
}

plan::StepPlan* planned_clock(const c10::Device& device) {
  const MetaMemory* planned = device.is_meta() ? MetaMemory::installed() : nullptr;
  return planned ? planned->clock.get() : nullptr;
}

bool computes_on_host(const c10::Device& device) {
  if (!device.is_meta()) return device.is_cpu();
  const plan::StepPlan* clock = planned_clock(device);
  return in_host_memory(device) || (clock && clock->synchronous());
}

bool in_host_memory(const c10::Device& device) {
  const MetaMemory* planned = device.is_meta() ? MetaMemory::installed() : nullptr;
  return device.is_cpu() || (planned && planned->on_host);
}

at::Tensor meta_bytes(int64_t bytes) {
  const c10::impl::ExcludeDispatchKeyGuard unseen(c10::python_ks);
  return at::empty({bytes}, at::TensorOptions().device(at::kMeta).dtype(at::kByte));
}

}  // namespace ds::storage
