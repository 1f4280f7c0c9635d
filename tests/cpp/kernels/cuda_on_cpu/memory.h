// What the machine knows of memory: a block's shared arrays and, where the kernels are compiled with a call before each
// access (CMakeLists.txt), which bytes a launch reads and writes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime.h"

namespace cuda_on_cpu {

// Each array lies between gaps that belong to nobody.
class SharedMemory {
 public:
  static constexpr size_t kBytes = 64 << 10, kGap = 64;
  static constexpr int kMostArrays = 16;

  SharedMemory();
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;

  // Forgets the arrays. `dynamic`: bytes of the first, without a declaration.
  void begin_block(size_t dynamic);
  // Null where a block has no memory for it.
  void* array(const void* declaration, size_t bytes, size_t alignment);
  void* dynamic() { return base_ + kGap; }

  bool contains(uintptr_t at) const { return at - reinterpret_cast<uintptr_t>(base_) < kBytes; }
  // What is wrong with an access; null where all is well.
  const char* read(uintptr_t at, size_t bytes) const;
  const char* write(uintptr_t at, size_t bytes);

 private:
  enum State : unsigned char { kOutside, kUnwritten, kWritten };
  struct Array {
    const void* declaration;
    char* at;
  };
  void* add(const void* declaration, size_t bytes, size_t alignment);

  char* base_ = nullptr;
  size_t used_ = 0, asked_ = 0;
  int count_ = 0;
  Array arrays_[kMostArrays];
  State states_[kBytes] = {};
};

// The memory that a launch writes, outside of shared arrays: to take it back, and to compare.
class WriteLog {
 public:
  void begin_launch();
  void note(uintptr_t at, size_t bytes, const void* from);
  // The first run's bytes are kept; those of a later run are compared with them. `from`: who wrote a byte that differs
  // last; false where none does.
  bool end_run(bool first, const void*& from);
  // All bytes as they were before the launch.
  void restore();

 private:
  static constexpr size_t kChunk = 512;
  struct Chunk {
    uintptr_t number;
    unsigned char before[kChunk], first[kChunk];
    uint64_t written[kChunk / 64];  // a bit for each byte
    const void* from[kChunk / 8];
  };
  Chunk& find(uintptr_t number);
  template <typename Byte>
  void for_written(const Byte& byte);

  std::vector<Chunk> chunks_;
  std::vector<uint32_t> slots_;  // by the hash of a chunk's number: 1 + its index, or 0
  size_t last_ = 0;
};

// What is watched on this thread of the host.
struct Watch {
  SharedMemory* shared;
  WriteLog* log;
  uintptr_t stacks;  // of fibers: what is written there, no other thread sees
  size_t stack_bytes;
  void (*fail)(const char* text, const void* from);
};
// Null: nothing. With a sanitizer nothing is watched.
void set_watch(const Watch* watch);

// "file:line" of an instruction.
std::string source_of(const void* instruction);

}  // namespace cuda_on_cpu
