#include "memory.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "counts.h"
#include "kernels.h"
#include "nccl.h"

namespace standin {

namespace {

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

char* page_of(const void* address) {
  return reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(address) / kPage * kPage);
}

}  // namespace

Mapping::Mapping(const char* name, int protection) : name_(name), protection_(protection) {
  map();
  static std::vector<Mapping*>* all = [] {  // a process that another one forks has memory of its own
    pthread_atfork(nullptr, nullptr, [] {
      for (Mapping* each : *all) each->map();
    });
    return new std::vector<Mapping*>;
  }();
  all->push_back(this);
}

void Mapping::map() {
  file_ = memfd_create(name_, MFD_CLOEXEC);
  TORCH_CHECK(file_ >= 0 && ftruncate(file_, kBytes) == 0, "no memory file for the stand-in: ", std::strerror(errno));
  const auto map = [&](char* place, int access) {
    void* at = mmap(place, kBytes, access, MAP_SHARED | MAP_NORESERVE | (place ? MAP_FIXED : 0), file_, 0);
    TORCH_CHECK(at != MAP_FAILED, "no addresses for the stand-in: ", std::strerror(errno));
    return static_cast<char*>(at);
  };
  begin_ = map(begin_, protection_);
  open_ = map(open_, PROT_READ | PROT_WRITE);
}

void Mapping::protect(const void* begin, const void* end, int protection) {
  char* first = page_of(begin);
  const size_t bytes = rounded(static_cast<size_t>(static_cast<const char*>(end) - first), kPage);
  if (mprotect(first, bytes, protection) != 0) std::abort();  // no words: a handler of page faults may be calling
}

void Mapping::drop(char* begin, size_t bytes) const {
  fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, begin - begin_, static_cast<off_t>(bytes));
}

DeviceMemory::DeviceMemory(c10::DeviceIndex device) : mapping("standin", PROT_NONE), device_(device) {
  if (const char* text = std::getenv("DS_STANDIN_MEMORY")) figures_.limit = std::strtoull(text, nullptr, 10);
  unreserved_[mapping.begin()] = Mapping::kBytes;
}

void* DeviceMemory::allocate(size_t bytes, Stream& stream) {
  if (bytes == 0) return nullptr;
  count(Count::kAllocations);
  const size_t counted = rounded(bytes, 512);
  char* address;
  {
    std::unique_lock lock(mutex_);
    settle();
    address = take(rounded(bytes, kPage), stream, false);
    const auto take_after = [&](const auto& call) {
      lock.unlock();
      call();
      lock.lock();
      return take(rounded(bytes, kPage), stream, true);
    };
    if (!address) address = take_after(nccl_memory_grows);
    if (!address) address = take_after([&] { give_back(); });
    TORCH_CHECK_WITH(OutOfMemoryError, address, "standin:", static_cast<int>(device_), " is out of memory: ", bytes,
                     " bytes are asked for, ", figures_.allocated, " are in use, ", figures_.reserved,
                     " are reserved, and the limit is ", figures_.limit);
    blocks_.at(address).counted = counted;
    figures_.allocated += counted;
    figures_.allocated_peak = std::max(figures_.allocated_peak, figures_.allocated);
  }
  if (runs_nothing()) return address;
  char* open = mapping.open(address);
  submit(stream, "fill of new memory", {{address, address + bytes, true}}, [=] { std::memset(open, 0xff, bytes); });
  return address;
}

char* DeviceMemory::take(size_t bytes, Stream& stream, bool grows) {
  auto fit = free_.lower_bound({&stream, bytes});
  char* address = nullptr;
  if (fit != free_.end() && fit->first.first == &stream) {
    address = *fit->second.begin();
    fit->second.erase(fit->second.begin());
    if (fit->second.empty()) free_.erase(fit);
  } else {
    if (!grows || figures_.reserved + bytes > figures_.limit) return nullptr;
    auto hole = unreserved_.begin();
    while (hole != unreserved_.end() && hole->second < bytes) ++hole;
    if (hole == unreserved_.end()) return nullptr;
    address = hole->first;
    if (hole->second > bytes) unreserved_[address + bytes] = hole->second - bytes;
    unreserved_.erase(address);
    blocks_[address] = {bytes, 0, &stream, {}, {}};
    count(Count::kReservations);
    figures_.reserved += bytes;
    figures_.reserved_peak = std::max(figures_.reserved_peak, figures_.reserved);
  }
  Block& block = blocks_.at(address);
  if (block.bytes > bytes) {
    char* rest = address + bytes;
    blocks_[rest] = {block.bytes - bytes, 0, &stream, {}, {}};
    free_[{&stream, block.bytes - bytes}].insert(rest);
    block.bytes = bytes;
  }
  return address;
}

void DeviceMemory::release(void* address) {
  count(Count::kReleases);
  const std::lock_guard lock(mutex_);
  const auto block = blocks_.find(static_cast<char*>(address));
  TORCH_INTERNAL_ASSERT(block != blocks_.end() && block->second.counted);
  figures_.allocated -= block->second.counted;
  block->second.counted = 0;
  for (Stream* user : block->second.users) block->second.last_uses.push_back(mark(*user));
  block->second.users.clear();
  if (block->second.last_uses.empty()) return make_free(block);
  unsettled_.push_back(block->first);
}

void DeviceMemory::make_free(Blocks::iterator block) {
  const auto free_entry = [&](Blocks::iterator which) { return std::pair(which->second.owner, which->second.bytes); };
  const auto is_free = [&](Blocks::iterator which) {
    const auto found = free_.find(free_entry(which));
    return found != free_.end() && found->second.count(which->first);
  };
  const auto not_free = [&](Blocks::iterator which) {
    const auto found = free_.find(free_entry(which));
    found->second.erase(which->first);
    if (found->second.empty()) free_.erase(found);
  };
  const auto joins = [&](Blocks::iterator first, Blocks::iterator second) {
    return first->first + first->second.bytes == second->first && first->second.owner == second->second.owner;
  };
  const auto next = std::next(block);
  if (next != blocks_.end() && joins(block, next) && is_free(next)) {
    not_free(next);
    block->second.bytes += next->second.bytes;
    blocks_.erase(next);
  }
  if (block != blocks_.begin() && joins(std::prev(block), block) && is_free(std::prev(block))) {
    const auto before = std::prev(block);
    not_free(before);
    before->second.bytes += block->second.bytes;
    blocks_.erase(block);
    block = before;
  }
  free_[free_entry(block)].insert(block->first);
}

void DeviceMemory::settle() {
  std::vector<char*> left;
  for (char* address : unsettled_) {
    const auto block = blocks_.find(address);
    bool over = true;
    for (const Mark& use : block->second.last_uses) over = over && use.stream->done(use.operation);
    if (!over) {
      left.push_back(address);
      continue;
    }
    {  // they have ended, so that they come before whatever uses the memory next
      const std::lock_guard lock(order().mutex);
      for (const Mark& use : block->second.last_uses)
        order().forget(address, address + block->second.bytes, use.stream->number, use.operation);
    }
    block->second.last_uses.clear();
    make_free(block);
  }
  unsettled_ = left;
}

void DeviceMemory::also_used_by(const void* address, Stream& stream) {
  if (!mapping.holds(address)) return;
  const std::lock_guard lock(mutex_);
  auto block = blocks_.upper_bound(static_cast<char*>(const_cast<void*>(address)));
  if (block == blocks_.begin()) return;
  --block;
  if (block->second.owner != &stream) block->second.users.insert(&stream);
}

void DeviceMemory::give_back() {
  synchronize_device(device_);
  const std::lock_guard lock(mutex_);
  settle();
  for (const auto& [key, addresses] : free_) {
    for (char* address : addresses) {
      size_t bytes = key.second;
      blocks_.erase(address);
      figures_.reserved -= bytes;
      mapping.drop(address, bytes);
      auto after = unreserved_.find(address + bytes);
      if (after != unreserved_.end()) {
        bytes += after->second;
        unreserved_.erase(after);
      }
      auto before = unreserved_.lower_bound(address);
      if (before != unreserved_.begin() && std::prev(before)->first + std::prev(before)->second == address)
        std::prev(before)->second += bytes;
      else
        unreserved_[address] = bytes;
    }
  }
  free_.clear();
}

void DeviceMemory::limit(size_t bytes) {
  const std::lock_guard lock(mutex_);
  figures_.limit = bytes;
}

Figures DeviceMemory::figures(bool new_peaks) {
  const std::lock_guard lock(mutex_);
  if (new_peaks) {
    figures_.allocated_peak = figures_.allocated;
    figures_.reserved_peak = figures_.reserved;
  }
  return figures_;
}

DeviceMemory& device_memory(c10::DeviceIndex device) {
  static auto* all = new std::array<DeviceMemory, kDevices>{DeviceMemory(0), DeviceMemory(1)};
  return all->at(device);
}

PinnedMemory::PinnedMemory() : mapping("standin_pinned", PROT_READ | PROT_WRITE), unused_(mapping.begin()) {}

void* PinnedMemory::allocate(size_t bytes) {
  if (bytes == 0) return nullptr;
  const size_t wanted = rounded(bytes, kPage);
  const std::lock_guard lock(order().mutex);
  const auto over = [](const Block& block) {
    for (const Use& use : block.uses)
      if (!has_ended(*use.operation)) return false;
    return true;
  };
  const char* address = nullptr;
  for (auto& [begin, block] : blocks_) {
    if (block.used || block.bytes < wanted || block.bytes > 2 * wanted || !over(block)) continue;
    if (address && blocks_.at(address).bytes <= block.bytes) continue;
    address = begin;
  }
  if (!address) {
    TORCH_CHECK_WITH(OutOfMemoryError, unused_ + wanted <= mapping.begin() + Mapping::kBytes,
                     "no pinned memory is left for ", bytes, " bytes");
    address = unused_;
    unused_ += wanted;
    blocks_[address].bytes = wanted;
  }
  Block& block = blocks_.at(address);
  for (const Use& use : block.uses)
    order().forget(address, address + block.bytes, use.operation->stream, use.operation->number);
  block.uses.clear();
  block.used = true;
  if (closed_.erase(address)) protect(address, block);
  std::memset(mapping.open(address), 0xff, bytes);
  return const_cast<char*>(address);
}

void PinnedMemory::release(void* address) {
  const std::lock_guard lock(order().mutex);
  blocks_.at(static_cast<char*>(address)).used = false;
}

PinnedMemory::Blocks::iterator PinnedMemory::block_of(const char* address) {
  auto block = blocks_.upper_bound(address);
  return block == blocks_.begin() ? blocks_.end() : std::prev(block);
}

void PinnedMemory::close(const OperationPtr& operation, const std::vector<Access>& accesses) {
  for (const Access& access : accesses) {
    if (access.begin == access.end || !mapping.holds(access.begin)) continue;
    install_fault_handler();
    const auto block = block_of(access.begin);
    block->second.uses.push_back({operation, access.begin, access.end, access.write});
    closed_.insert(block->first);
    protect(block->first, block->second);
  }
}

void PinnedMemory::reopen() {
  for (auto at = closed_.begin(); at != closed_.end();) {
    Block& block = blocks_.at(*at);
    const size_t before = block.uses.size();
    const auto known = [](const Use& use) { return order().host.at(use.operation->stream) >= use.operation->number; };
    block.uses.erase(std::remove_if(block.uses.begin(), block.uses.end(), known), block.uses.end());
    if (block.uses.size() != before) protect(*at, block);
    at = block.uses.empty() ? closed_.erase(at) : std::next(at);
  }
}

void PinnedMemory::protect(const char* begin, const Block& block) {
  Mapping::protect(begin, begin + block.bytes, PROT_READ | PROT_WRITE);
  for (const bool write : {false, true})
    for (const Use& use : block.uses)
      if (use.write == write) Mapping::protect(use.begin, use.end, write ? PROT_NONE : PROT_READ);
}

void PinnedMemory::host_access(const char* address, bool write) {
  OperationPtr user;
  {
    const std::lock_guard lock(order().mutex);
    const auto block = block_of(address);
    if (block == blocks_.end()) return;
    std::vector<Use>& uses = block->second.uses;
    const auto used = std::find_if(uses.begin(), uses.end(), [&](const Use& use) {
      return use.begin <= address && address < use.end && (write || use.write);
    });
    if (used == uses.end())  // a neighbour on the same page
      return Mapping::protect(page_of(address), page_of(address) + kPage, PROT_READ | PROT_WRITE);
    user = used->operation;
    uses.erase(used);  // one report is enough
    protect(block->first, block->second);
  }
  order().report(std::string("the host ") + (write ? "writes" : "reads") +
                 " pinned memory that a queued operation uses, and has not waited for it:\n" + Stack::here().text() +
                 "  and the operation is\n    " + user->name + ", queued by\n" + user->stack.text());
}

PinnedMemory& pinned_memory() {
  static auto* one = new PinnedMemory;
  return *one;
}

const Mapping* mapping_of(const void* address) {
  for (c10::DeviceIndex device = 0; device < kDevices; ++device)
    if (device_memory(device).mapping.holds(address)) return &device_memory(device).mapping;
  return pinned_memory().mapping.holds(address) ? &pinned_memory().mapping : nullptr;
}

void* open_address(const void* address) {
  const Mapping* mapping = mapping_of(address);
  return mapping ? mapping->open(address) : const_cast<void*>(address);
}

namespace {

void release_device(void* address) {
  for (c10::DeviceIndex device = 0; device < kDevices; ++device)
    if (device_memory(device).mapping.holds(address)) return device_memory(device).release(address);
}

void release_pinned(void* address) {
  if (address) pinned_memory().release(address);
}

c10::DataPtr allocate_device(size_t bytes) {
  const c10::DeviceIndex device = current_device();
  void* address = device_memory(device).allocate(bytes, current_stream(device));
  return {address, address, &release_device, c10::Device(kStandin, device)};
}

c10::DataPtr allocate_pinned(size_t bytes) {
  void* address = pinned_memory().allocate(bytes);
  return {address, address, &release_pinned, c10::Device(c10::DeviceType::CPU)};
}

// One of the two functions allocate() is torch's, which is const in torch 1.
template <c10::DataPtr (*kAllocate)(size_t), void (*kRelease)(void*)>
class AllocatorOf final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) const { return kAllocate(bytes); }
  c10::DataPtr allocate(size_t bytes) { return kAllocate(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return kRelease; }
  void copy_data(void*, const void*, size_t) const {
    TORCH_CHECK(false, "the stand-in copies tensors, not allocations");
  }
};

}  // namespace

void also_used_by(const void* address, Stream& stream) {
  for (c10::DeviceIndex device = 0; device < kDevices; ++device) device_memory(device).also_used_by(address, stream);
}

c10::Allocator& device_allocator() {
  static auto* one = new AllocatorOf<&allocate_device, &release_device>;
  return *one;
}

c10::Allocator& pinned_allocator() {
  static auto* one = new AllocatorOf<&allocate_pinned, &release_pinned>;
  return *one;
}

}  // namespace standin
