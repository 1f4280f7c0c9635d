// The library that stands in for NCCL (tests/cpp/comm/fake_nccl), with its operations on the stand-in's streams. It is
// told of waits of the host and of other streams for them, and that a device grows its memory.
#include "nccl.h"

#include <dlfcn.h>

#include <algorithm>
#include <map>

#include "../cpp/comm/fake_nccl/fake_nccl.h"
#include "counts.h"
#include "memory.h"
#include "standin.h"

namespace standin {

namespace {

struct Library {
  decltype(&fake_nccl_memory_grows) memory_grows = nullptr;
  decltype(&fake_nccl_host_waits) host_waits = nullptr;
  decltype(&fake_nccl_host_goes_on) host_goes_on = nullptr;
};

Library& library() {
  static auto* one = new Library;
  return *one;
}

// Operations that have not ended, by their device and the library's number.
class Pending {
 public:
  using Key = std::pair<c10::DeviceIndex, int64_t>;

  template <typename Submit>
  void add(Stream& stream, int64_t number, const Submit& submitted) {
    const std::lock_guard lock(mutex_);  // it may end at once
    const uint64_t operation = submitted();
    all_[{stream.device, number}] = {&stream, operation};
  }
  void remove(const Key& key) {
    const std::lock_guard lock(mutex_);
    all_.erase(key);
  }
  // Returns the last operation of each stream that comes before the mark.
  std::map<Stream*, int64_t> before(const Mark& mark) {
    std::map<Stream*, int64_t> last;
    const std::lock_guard lock(mutex_);
    for (const auto& [key, one] : all_)
      if (mark.clock.at(one.first->number) >= one.second) last[one.first] = key.second;  // numbers ascend
    return last;
  }
  // All of them, on the device of the mark.
  size_t before(const Mark& mark, int64_t* numbers, size_t most) {
    size_t count = 0;
    const std::lock_guard lock(mutex_);
    for (const auto& [key, one] : all_)
      if (key.first == mark.stream->device && mark.clock.at(one.first->number) >= one.second && count < most)
        numbers[count++] = key.second;
    return count;
  }

 private:
  std::mutex mutex_;
  std::map<Key, std::pair<Stream*, uint64_t>> all_;
};

Pending& pending() {
  static auto* one = new Pending;
  return *one;
}

Stream& given(void* stream) { return stream ? *static_cast<Stream*>(stream) : current_stream(current_device()); }

// Work that says what it reads and writes, and uses the addresses that open_address() gives. It may wait for others.
void queue(void* on, const fake_nccl::Range* ranges, size_t count, void (*run)(void*), void* operation,
           int64_t number) {
  std::vector<Access> accesses;
  for (size_t i = 0; i < count; ++i) {
    const auto* begin = static_cast<const char*>(ranges[i].memory);
    if (mapping_of(begin)) accesses.push_back({begin, begin + ranges[i].bytes, ranges[i].written != 0});
  }
  standin::count(Count::kCollectives);
  Stream& stream = given(on);
  pending().add(stream, number, [&] {
    return submit_always(stream, "NCCL", std::move(accesses), [=, device = stream.device] {
      run(operation);
      pending().remove({device, number});
    });
  });
}

}  // namespace

NcclHostWait::NcclHostWait(const Mark& mark) {
  if (!library().host_waits || mark.stream->done(mark.operation)) return;
  for (const auto& [stream, number] : pending().before(mark)) {
    const c10::DeviceIndex before = exchange_device(stream->device);
    library().host_waits(stream, number);
    exchange_device(before);
    told_ = true;
  }
}

NcclHostWait::~NcclHostWait() {
  if (told_) library().host_goes_on();
}

void nccl_memory_grows() {
  if (library().memory_grows) library().memory_grows();
}

}  // namespace standin

extern "C" __attribute__((visibility("default"))) const char* standin_use_nccl(const char* path) {
  static const fake_nccl::DeviceCalls calls = {
      [] { return static_cast<int>(standin::current_device()); }, &standin::queue,
      [](void* memory) { return standin::open_address(memory); },
      [](void* stream) -> void* { return &standin::given(stream); },
      [](void* stream, int64_t* numbers, size_t most) {
        return standin::pending().before(standin::mark(standin::given(stream)), numbers, most);
      }};
  void* opened = dlopen(path, RTLD_NOW);
  if (!opened) return dlerror();
  bool whole = true;
  const auto find = [&](auto*& function, const char* name) {
    if (whole) function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(opened, name));
    whole = function != nullptr;
  };
  decltype(&fake_nccl_use_device) use = nullptr;
  standin::Library found;
  find(use, "fake_nccl_use_device");
  find(found.memory_grows, "fake_nccl_memory_grows");
  find(found.host_waits, "fake_nccl_host_waits");
  find(found.host_goes_on, "fake_nccl_host_goes_on");
  if (!whole) return dlerror();
  use(&calls);
  standin::library() = found;
  return nullptr;
}
