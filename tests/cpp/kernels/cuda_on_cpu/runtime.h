// The calls that a CUDA thread may make to the machine that runs it, and the launch. cuda_runtime.h puts CUDA's names
// on it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

namespace cuda_on_cpu {

constexpr unsigned kWarp = 32, kMostThreads = 1024;
constexpr size_t kMostShared = 48 << 10;  // what every GPU gives a block without being asked

struct Index {
  unsigned x;
};
struct Position {
  Index thread, block, block_size, grid_size;
};
// Where in the source a thread waits, or declares an array.
struct Site {
  const char* file;
  int line;
};
struct Grid {
  unsigned blocks, threads;
  size_t shared;  // bytes of dynamic shared memory
};

// ---- for the thread that runs ----
const Position& position();
// Until all threads of the block are at `site`.
void sync_block(Site site);
// Until all lanes of the warp that `mask` names are at `site`.
void sync_warp(unsigned mask, Site site);
// As sync_warp, and returns the bits that `lane` gave. Orders no memory, as on a GPU.
uint64_t of_lane_bits(unsigned mask, uint64_t bits, unsigned lane, Site site);
// The block's array of this declaration: filled with NaN, and nothing may read a byte before some thread wrote it.
void* shared_array(const void* declaration, size_t bytes, size_t alignment, Site site);
void* dynamic_shared();

// ---- for the host ----
// Hands the launch to the runner (on_cpu.h). `thread` is called as each thread of each block.
void launch(void* stream, Grid grid, std::function<void()> thread);

}  // namespace cuda_on_cpu
