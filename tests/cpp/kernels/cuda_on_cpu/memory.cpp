#include "memory.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "sanitizers.h"

namespace cuda_on_cpu {
namespace {

char* fresh_pages(size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) std::perror("mmap of shared memory"), std::abort();
  return static_cast<char*>(at);
}

}  // namespace

SharedMemory::SharedMemory() : base_(fresh_pages(kBytes)) { poison(base_, kBytes); }

SharedMemory::~SharedMemory() {
  unpoison(base_, kBytes);
  munmap(base_, kBytes);
}

void SharedMemory::begin_block(size_t dynamic) {
  if (kThreadSanitizer) {  // new pages: what another block did with the old ones is no race
    munmap(base_, kBytes);
    base_ = fresh_pages(kBytes);
  }
  std::memset(states_, kOutside, used_);
  poison(base_, used_);
  used_ = kGap, asked_ = 0, count_ = 0;
  add(nullptr, dynamic, 16);
}

void* SharedMemory::array(const void* declaration, size_t bytes, size_t alignment) {
  for (int i = 1; i < count_; ++i)
    if (arrays_[i].declaration == declaration) return arrays_[i].at;
  return add(declaration, bytes, alignment);
}

void* SharedMemory::add(const void* declaration, size_t bytes, size_t alignment) {
  if (alignment < 16) alignment = 16;
  const size_t begin = (used_ + alignment - 1) / alignment * alignment;
  if (asked_ + bytes > kMostShared || count_ == kMostArrays || begin + bytes + kGap > kBytes) return nullptr;
  char* at = base_ + begin;
  unpoison(at, bytes);
  std::memset(states_ + begin, kUnwritten, bytes);
  // Numbers that are NaN. The thread sanitizer would take this for an access of the thread that comes first.
  if (!kThreadSanitizer) std::memset(at, 0xff, bytes);
  used_ = begin + bytes + kGap;
  asked_ += bytes;
  arrays_[count_++] = {declaration, at};
  return at;
}

const char* SharedMemory::read(uintptr_t at, size_t bytes) const {
  const size_t begin = at - reinterpret_cast<uintptr_t>(base_);
  for (size_t i = begin; i < begin + bytes && i < kBytes; ++i) {
    if (states_[i] == kOutside) return "reads outside of its shared arrays";
    if (states_[i] == kUnwritten) return "reads shared memory that no thread of its block has written";
  }
  return nullptr;
}

const char* SharedMemory::write(uintptr_t at, size_t bytes) {
  const size_t begin = at - reinterpret_cast<uintptr_t>(base_);
  for (size_t i = begin; i < begin + bytes && i < kBytes; ++i) {
    if (states_[i] == kOutside) return "writes outside of its shared arrays";
    states_[i] = kWritten;
  }
  return nullptr;
}

void WriteLog::begin_launch() {
  chunks_.clear();
  if (slots_.empty()) slots_.resize(1024);
  std::fill(slots_.begin(), slots_.end(), 0);
}

WriteLog::Chunk& WriteLog::find(uintptr_t number) {
  if (last_ < chunks_.size() && chunks_[last_].number == number) return chunks_[last_];
  if (chunks_.size() * 2 >= slots_.size()) {
    std::vector<uint32_t> wider(slots_.size() * 4);
    slots_.swap(wider);
    for (size_t i = 0; i < chunks_.size(); ++i) {
      size_t slot = chunks_[i].number * 0x9e3779b97f4a7c15u >> 20;
      while (slots_[slot %= slots_.size()] != 0) ++slot;
      slots_[slot] = static_cast<uint32_t>(i + 1);
    }
  }
  size_t slot = number * 0x9e3779b97f4a7c15u >> 20;
  for (; slots_[slot %= slots_.size()] != 0; ++slot) {
    last_ = slots_[slot] - 1;
    if (chunks_[last_].number == number) return chunks_[last_];
  }
  last_ = chunks_.size();
  chunks_.emplace_back();
  slots_[slot] = static_cast<uint32_t>(chunks_.size());
  Chunk& chunk = chunks_.back();
  chunk.number = number;
  std::memcpy(chunk.before, reinterpret_cast<const void*>(number * kChunk), kChunk);
  std::memcpy(chunk.first, chunk.before, kChunk);
  std::memset(chunk.written, 0, sizeof chunk.written);
  return chunk;
}

void WriteLog::note(uintptr_t at, size_t bytes, const void* from) {
  while (bytes > 0) {
    Chunk& chunk = find(at / kChunk);
    const size_t begin = at % kChunk, count = bytes < kChunk - begin ? bytes : kChunk - begin;
    for (size_t i = begin; i < begin + count; ++i) chunk.written[i / 64] |= uint64_t{1} << i % 64;
    for (size_t i = begin / 8; i <= (begin + count - 1) / 8; ++i) chunk.from[i] = from;
    at += count, bytes -= count;
  }
}

template <typename Byte>
void WriteLog::for_written(const Byte& byte) {
  for (Chunk& chunk : chunks_) {
    auto* memory = reinterpret_cast<unsigned char*>(chunk.number * kChunk);
    for (size_t word = 0; word < kChunk / 64; ++word)
      for (uint64_t bits = chunk.written[word]; bits != 0; bits &= bits - 1) {
        const size_t i = word * 64 + static_cast<size_t>(__builtin_ctzll(bits));
        byte(chunk, i, memory[i]);
      }
  }
}

bool WriteLog::end_run(bool first, const void*& from) {
  bool differs = false;
  for_written([&](Chunk& chunk, size_t i, unsigned char now) {
    if (first) chunk.first[i] = now;
    if (chunk.first[i] == now || differs) return;
    differs = true;
    from = chunk.from[i / 8];
  });
  return differs;
}

void WriteLog::restore() {
  for_written([](Chunk& chunk, size_t i, unsigned char& memory) { memory = chunk.before[i]; });
}

std::string source_of(const void* instruction) {
  Dl_info library;
  if (dladdr(instruction, &library) == 0 || library.dli_fname == nullptr) return "an unknown place";
  const auto offset = static_cast<const char*>(instruction) - static_cast<const char*>(library.dli_fbase) - 1;
  char command[4096], line[4096] = "";
  std::snprintf(command, sizeof command, "addr2line -e '%s' 0x%zx", library.dli_fname, static_cast<size_t>(offset));
  if (FILE* pipe = popen(command, "r")) {
    if (std::fgets(line, sizeof line, pipe) != nullptr) line[std::strcspn(line, " \n")] = '\0';
    pclose(pipe);
  }
  return line[0] != '\0' ? line : "an unknown place";
}

// ---- the calls that the compiler puts before each access
// -------------------------------------------------------------
#if defined(CUDA_ON_CPU_ADDRESS) || defined(CUDA_ON_CPU_THREAD)
void set_watch(const Watch*) {}
#else
namespace {

__attribute__((tls_model("initial-exec"))) thread_local const Watch* watching = nullptr;

inline void reads(const void* data, size_t bytes, const void* from) {
  const Watch* w = watching;
  const auto at = reinterpret_cast<uintptr_t>(data);
  if (w == nullptr || !w->shared->contains(at)) return;
  if (const char* wrong = w->shared->read(at, bytes)) w->fail(wrong, from);
}

inline void writes(const void* data, size_t bytes, const void* from) {
  const Watch* w = watching;
  const auto at = reinterpret_cast<uintptr_t>(data);
  if (w == nullptr || at - w->stacks < w->stack_bytes) return;
  if (!w->shared->contains(at)) return w->log->note(at, bytes, from);
  if (const char* wrong = w->shared->write(at, bytes)) w->fail(wrong, from);
}

}  // namespace

void set_watch(const Watch* watch) { watching = watch; }

#define CUDA_ON_CPU_ACCESS(bytes)                                                               \
  void __tsan_read##bytes(void* at) { reads(at, bytes, __builtin_return_address(0)); }          \
  void __tsan_write##bytes(void* at) { writes(at, bytes, __builtin_return_address(0)); }        \
  void __tsan_volatile_read##bytes(void* at) { reads(at, bytes, __builtin_return_address(0)); } \
  void __tsan_volatile_write##bytes(void* at) { writes(at, bytes, __builtin_return_address(0)); }

extern "C" {
CUDA_ON_CPU_ACCESS(1)
CUDA_ON_CPU_ACCESS(2)
CUDA_ON_CPU_ACCESS(4)
CUDA_ON_CPU_ACCESS(8)
CUDA_ON_CPU_ACCESS(16)
void __tsan_read_range(void* at, size_t bytes) { reads(at, bytes, __builtin_return_address(0)); }
void __tsan_write_range(void* at, size_t bytes) { writes(at, bytes, __builtin_return_address(0)); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
// Of the host: a static object asks whether it has been made.
unsigned char __tsan_atomic8_load(const volatile unsigned char* at, int order) { return __atomic_load_n(at, order); }
}
#endif

}  // namespace cuda_on_cpu
