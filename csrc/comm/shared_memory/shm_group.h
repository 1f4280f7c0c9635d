// Collectives of the ranks of one host through shared memory. One thread at a time; on return the work is done.
//
// [Note: turns]
// A rank writes into its own slots and reads those of the others. There are two slots, used in turn by every step of
// every operation: what is written in step k + 2 overwrites step k, and a rank gets there only through the barrier of
// step k + 1, into which every other rank goes when it has finished reading step k. So a step costs one barrier. (One
// turn for *all* operations: with one for each kind, two kinds in a row would meet in the same slot.)
#pragma once
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <vector>

#include "base/clock.h"
#include "comm/calls/reduce_op.h"
#include "comm/shared_memory/shm_channel.h"
#include "comm/calls/strided_parts.h"

namespace ds::comm {

// The start of each rank's part, by rank.
using Rows = std::vector<char*>;
// Rows of `row_bytes` that follow each other.
Rows rows_of(void* data, int count, size_t row_bytes);
// Rows of counts[r] elements that follow each other.
Rows rows_at(void* data, const std::vector<int64_t>& counts, size_t element_bytes);

class ShmGroup {
 public:
  // Bytes of the shared memory that a rank touches, its own and that of others, in all_to_alls of up to `message` bytes
  // from rank to rank.
  static int64_t exchange_memory(int size, int64_t message);
  // Collective, see SharedSegments::create; null on all ranks where it is impossible.
  static std::unique_ptr<ShmGroup> create(int rank, int size, const Rendezvous& rendezvous, milliseconds timeout,
                                          const GroupFacts& facts = {});

  int rank() const { return rank_; }
  int size() const { return size_; }
  ShmChannel& channel() { return channel_; }

  // Elements are counted as `numel` of `type`; memory belongs to the caller. `tag`: what it is for, see Record.
  void all_reduce(void* data, size_t numel, c10::ScalarType type, ReduceOp op, const std::string& tag = {});
  void reduce(void* data, size_t numel, c10::ScalarType type, ReduceOp op, int root,
              const std::string& tag = {});  // only the root's data changes
  void broadcast(void* data, size_t numel, c10::ScalarType type, int root, const std::string& tag = {});
  // Rank r's `numel` elements come into out[r]; `mine` may be out[rank()].
  void all_gather(const Rows& out, const void* mine, size_t numel, c10::ScalarType type, const std::string& tag = {});
  // out: the reduction of in[rank()] over the ranks, `numel` elements; it may be in[rank()] itself.
  // wide: `out` is fp32 although the input is a 16-bit float.
  void reduce_scatter(void* out, const Rows& in, size_t numel, c10::ScalarType type, ReduceOp op, bool wide,
                      const std::string& tag = {});
  // To rank r go the `give[r]` elements at in[r]; from it come `take[r]` to out[r].
  void all_to_all(const Rows& out, const std::vector<int64_t>& take, const Rows& in, const std::vector<int64_t>& give,
                  c10::ScalarType type, const std::string& tag = {});
  // all_to_all on strided views, without packing.
  void all_to_all(const StridedParts& parts, c10::ScalarType type, const std::string& tag = {});
  void gather(const Rows& out, const void* mine, size_t numel, c10::ScalarType type, int root,
              const std::string& tag = {});  // root: out, else {}
  void scatter(void* mine, const Rows& in, size_t numel, c10::ScalarType type, int root,
               const std::string& tag = {});  // root: in, else {}
  void barrier();
  // No data moves; ranks that do not say the same fail.
  void agree(const Record& call);

 private:
  ShmGroup(int rank, int size, std::shared_ptr<SharedSegments> segments, milliseconds timeout, const GroupFacts& facts);

  void exchange(const RowsOfRanks& rows, const std::vector<int64_t>& take, const std::vector<int64_t>& give,
                c10::ScalarType type, const std::string& tag);
  void all_reduce_in_shares(void* data, size_t numel, c10::ScalarType type, ReduceOp op, const Record& call);
  char* slot(int rank, int turn) const;
  char* slot(int rank) const { return slot(rank, turn_); }  // of the step in hand
  int64_t* counts_of(int rank) const;                       // of an exchange: what it gives to each rank, and takes
  std::string uneven_pair() const;
  void next_step(bool first, const Record& record);
  Record call_of(const char* what, size_t numel, c10::ScalarType type, const std::string& tag = {}) const {
    return record(what, static_cast<int64_t>(numel), static_cast<int32_t>(type), tag);
  }

  int rank_, size_;
  std::shared_ptr<SharedSegments> segments_;
  ShmChannel channel_;
  int turn_ = 0;
};

}  // namespace ds::comm
