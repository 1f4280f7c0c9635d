// The bytes that a ShardStorage holds, and its transfers.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace ds::storage {

struct MediumUsage {
  std::string name;
  int64_t resting = 0;       // bytes of planes at rest
  int64_t staged = 0;        // copies of leases, of prefetches and of write backs on their way
  int64_t scratch = 0;       // scratch that is lent
  int64_t idle = 0;          // scratch that is kept for the next lease
  int64_t peak = 0;          // the most of all four together
  int64_t peak_scratch = 0;  // the most of scratch and idle together
  int64_t over_budget = 0;   // times that more than the budget was granted
  // Planes of this tier: bytes fetched and written back, the time of these copies, and the time that acquire() waited.
  int64_t read_bytes = 0, written_bytes = 0;
  double read_seconds = 0, write_seconds = 0, waited_seconds = 0;
  int64_t total() const { return resting + staged + scratch + idle; }
};

// Figures of one user of scratch in one medium.
struct ScratchUsage {
  int64_t lent = 0, idle = 0, peak = 0;  // bytes, copies of its planes among them; the most of both together
};

// One transfer of a block between the memory where it rests and a copy.
struct CopyRecord {
  std::string plane, medium;  // of the block at rest
  bool read = true;
  int64_t bytes = 0;
  double begin = 0, end = 0;  // seconds on `Clock`
};

struct Usage {
  std::vector<MediumUsage> media;  // by Medium
  int64_t leases = 0;              // that are out now
  int64_t budget_waits = 0;        // leases that waited for transfers to end before there was room
  int64_t prefetches = 0, prefetch_hits = 0, prefetch_drops = 0;
  int64_t write_backs = 0;
  int64_t unpinned_bytes = 0;  // host memory that was to be pinned and is not
  std::string unpinned_reason;

  const MediumUsage& operator[](size_t medium) const { return media[medium]; }
};

}  // namespace ds::storage
