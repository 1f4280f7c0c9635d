// The machine's knowledge of memory: a block's shared arrays and, where the kernels are compiled with a call before
// each access (cmake/CudaOnCpu.cmake), which bytes a launch reads and writes.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime.h"
#include "sanitizers.h"

namespace cuda_on_cpu {

// Each array lies between gaps that belong to nobody.
class SharedMemory {
 public:
  static constexpr size_t kBytes = 64 << 10, kGap = 64;

  SharedMemory() { map(), poison(base_, kBytes); }
  ~SharedMemory() { unpoison(base_, kBytes), munmap(base_, kBytes); }
  SharedMemory(const SharedMemory&) = delete;

  // Forgets the arrays. `dynamic`: bytes of the first, without a declaration.
  void begin_block(size_t dynamic) {
    if (kThreadSanitizer) munmap(base_, kBytes), map();  // what another block did with the old pages is no race
    if (!kThreadSanitizer) std::memset(states_, kOutside, used_);
    poison(base_, used_);
    used_ = kGap, asked_ = 0, count_ = 0;
    add(nullptr, dynamic, 16);
  }
  void* dynamic() { return base_ + kGap; }
  // Null where a block has no memory for it.
  void* array(const void* declaration, size_t bytes, size_t alignment) {
    for (int i = 1; i < count_; ++i)
      if (arrays_[i].declaration == declaration) return arrays_[i].at;
    return add(declaration, bytes, alignment);
  }

  bool contains(uintptr_t at) const { return at - reinterpret_cast<uintptr_t>(base_) < kBytes; }
  // The error of an access; null where all is well.
  const char* access(uintptr_t at, size_t bytes, bool writes) {
    const size_t begin = at - reinterpret_cast<uintptr_t>(base_);
    for (size_t i = begin; i < begin + bytes && i < kBytes; ++i) {
      if (states_[i] == kOutside)
        return writes ? "writes outside of its shared arrays" : "reads outside of its shared arrays";
      if (writes) states_[i] = kWritten;
      if (states_[i] == kUnwritten) return "reads shared memory that no thread of its block has written";
    }
    return nullptr;
  }

 private:
  void map() {
    void* at = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) std::perror("mmap of shared memory"), std::abort();
    base_ = static_cast<char*>(at);
  }
  void* add(const void* declaration, size_t bytes, size_t alignment) {
    if (alignment < 16) alignment = 16;
    const size_t begin = (used_ + alignment - 1) / alignment * alignment;
    if (asked_ + bytes > kMostShared || count_ == kMostArrays || begin + bytes + kGap > kBytes) return nullptr;
    unpoison(base_ + begin, bytes);
    if (!kThreadSanitizer) {  // which would take this for an access of the thread that comes first
      std::memset(states_ + begin, kUnwritten, bytes);
      std::memset(base_ + begin, 0xff, bytes);  // numbers that are NaN
    }
    used_ = begin + bytes + kGap;
    asked_ += bytes;
    arrays_[count_++] = {declaration, base_ + begin};
    return base_ + begin;
  }

  static constexpr int kMostArrays = 16;
  struct Array {
    const void* declaration;
    char* at;
  } arrays_[kMostArrays];
  enum State : unsigned char { kOutside, kUnwritten, kWritten } states_[kBytes] = {};
  char* base_ = nullptr;
  size_t used_ = 0, asked_ = 0;
  int count_ = 0;
};

// The memory that a launch uses, outside of shared arrays: to take writes back, to compare them, and to tell others.
class AccessLog {
 public:
  void begin_launch(bool reads) { chunks_.clear(), by_number_.clear(), last_ = 0, reads_ = reads; }
  bool reads() const { return reads_; }  // whether they are noted, too: in the first run

  // `from`: the instruction that writes; null for a read.
  void note(uintptr_t at, size_t bytes, const void* from) {
    while (bytes > 0) {
      Chunk& chunk = find(at / kChunk);
      const size_t begin = at % kChunk, count = bytes < kChunk - begin ? bytes : kChunk - begin;
      uint64_t* bits = from != nullptr ? chunk.written : chunk.read;
      for (size_t i = begin; i < begin + count; ++i) bits[i / 64] |= uint64_t{1} << i % 64;
      for (size_t i = begin / 8; from != nullptr && i <= (begin + count - 1) / 8; ++i) chunk.from[i] = from;
      at += count, bytes -= count;
    }
  }
  // The first run's bytes are kept; those of a later run are compared with them. Returns who wrote a byte that differs
  // last, or null.
  const void* end_run(bool first) {
    const void* differs = nullptr;
    for (Chunk& chunk : chunks_)
      each_byte(chunk, chunk.written, [&](size_t i, unsigned char now) {
        if (first) chunk.first[i] = now;
        if (chunk.first[i] != now && differs == nullptr) differs = chunk.from[i / 8];
      });
    reads_ = false;
    return differs;
  }
  // All bytes as they were before the launch.
  void restore() {
    for (Chunk& chunk : chunks_)
      each_byte(chunk, chunk.written, [&](size_t i, unsigned char& memory) { memory = chunk.before[i]; });
  }
  // Calls visit(begin, bytes, whether it is written) with runs of bytes that were read or written.
  template <typename Visit>
  void each_run(const Visit& visit) {
    std::sort(chunks_.begin(), chunks_.end(), [](const Chunk& a, const Chunk& b) { return a.number < b.number; });
    for (const bool writes : {false, true}) {
      unsigned char *begin = nullptr, *end = nullptr;
      for (Chunk& chunk : chunks_)
        each_byte(chunk, writes ? chunk.written : chunk.read, [&](size_t, unsigned char& memory) {
          if (&memory != end && begin != end) visit(begin, static_cast<size_t>(end - begin), writes);
          if (&memory != end) begin = &memory;
          end = &memory + 1;
        });
      if (begin != end) visit(begin, static_cast<size_t>(end - begin), writes);
    }
  }

 private:
  static constexpr size_t kChunk = 512;
  struct Chunk {
    uintptr_t number;
    unsigned char before[kChunk], first[kChunk];
    uint64_t read[kChunk / 64], written[kChunk / 64];  // a bit for each byte
    const void* from[kChunk / 8];
  };

  Chunk& find(uintptr_t number) {
    if (last_ < chunks_.size() && chunks_[last_].number == number) return chunks_[last_];
    const auto [found, fresh] = by_number_.try_emplace(number, chunks_.size());
    last_ = found->second;
    if (fresh) {
      Chunk chunk = {};
      chunk.number = number;
      std::memcpy(chunk.before, reinterpret_cast<const void*>(number * kChunk), kChunk);
      std::memcpy(chunk.first, chunk.before, kChunk);
      chunks_.push_back(chunk);
    }
    return chunks_[last_];
  }
  template <typename Byte>
  static void each_byte(const Chunk& chunk, const uint64_t* marked, const Byte& byte) {
    auto* memory = reinterpret_cast<unsigned char*>(chunk.number * kChunk);
    for (size_t word = 0; word < kChunk / 64; ++word)
      for (uint64_t bits = marked[word]; bits != 0; bits &= bits - 1) {
        const size_t i = word * 64 + static_cast<size_t>(__builtin_ctzll(bits));
        byte(i, memory[i]);
      }
  }

  std::vector<Chunk> chunks_;
  std::unordered_map<uintptr_t, size_t> by_number_;
  size_t last_ = 0;
  bool reads_ = false;
};

// The launch that is watched on this thread of the host.
struct Watch {
  SharedMemory* shared;
  AccessLog* log;
  uintptr_t stacks;  // of fibers: what is written there, no other thread sees
  size_t stack_bytes;
  void (*fail)(const char* text, const void* from);
};
// Null: nothing. With a sanitizer nothing is watched.
void set_watch(const Watch* watch);

// "file:line" of an instruction.
std::string source_of(const void* instruction);

}  // namespace cuda_on_cpu
