// The placement of memory, ways to access it, and limits on its size.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace ds::storage {

// A tier, by number. Others are registered by name (storage/tier.h) and numbered from 3 on.
enum class Medium : uint8_t { kDevice, kHost, kFile };

enum class Access {
  kRead,    // others may read, too
  kWrite,   // alone; what was there is not fetched, every element of the range will be written
  kUpdate,  // alone; reads and writes
};

// The ends of blocks, in elements, rising; the last is the plane's length. Empty: one block.
using Cuts = std::vector<int64_t>;

struct Placement {
  Medium rest = Medium::kDevice;  // the medium of blocks between leases
  Medium work = Medium::kDevice;  // the medium of the blocks that `host_share` leaves out
  bool pinned = false;            // host memory that a device copies from and to by itself
  double host_share = 1.0;        // of the elements, in whole blocks from the first on: they rest at `rest`
  std::string folder;             // of kFile: it exists
  // Share of the elements, in whole blocks from the first on, that rests in files; and `host_share` counts from there
  // on.
  double file_share = 0.0;

  bool in_files() const { return rest == Medium::kFile || work == Medium::kFile || file_share > 0.0; }
};

inline bool operator==(const Placement& a, const Placement& b) {
  return a.rest == b.rest && a.work == b.work && a.pinned == b.pinned && a.host_share == b.host_share &&
         a.folder == b.folder && a.file_share == b.file_share;
}

struct Budget {
  std::map<Medium, int64_t> bytes;  // a medium that is not named has no limit
  int64_t idle_scratch = 0;  // bytes of each medium that wait for the next lease; at least the largest buffer twice
  int transfer_threads = 2;  // started with the first transfer in the background
  std::string scratch = "scratch";  // on the meta device: the owner of leases and copies (MetaMemory)
};

}  // namespace ds::storage
