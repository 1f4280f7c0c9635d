// Buffers of a training run in several kinds of memory, behind leases.
//
// [Note: planes]
// A *plane* is one buffer of elements, masters of one space for example. It rests in a tier and is moved in *blocks*,
// between the cuts that it was added with. A caller that works on a range acquires a *lease* of it in the medium where
// it works. If the range rests there already, the lease is a view; otherwise a copy, fetched before acquire() returns
// and written back, in the background, after the lease has gone.
//
// [Note: exclusion]
// Leases of the same block: many kRead ones, or one of the others, and that one ends when its write back has. acquire()
// waits until no lease excludes it. A caller that holds a lease and asks for another one that excludes it waits for
// ever.
//
// [Note: budget]
// The bytes of a lease, a prefetch or a plane are counted before they are allocated. Above the budget, idle scratch is
// freed first, then prefetched copies that nobody has taken are dropped, then acquire() waits for transfers that will
// free memory by themselves. If none is left, it gets its memory all the same, and Usage::over_budget counts it: a
// budget never makes a run stop.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/step_clock.h"
#include "io/folders/run_folder.h"
#include "plan/range.h"
#include "storage/file_access.h"
#include "storage/placement.h"
#include "storage/scratch_pool.h"
#include "storage/usage.h"

namespace ds::storage {

struct Plane;
struct Staging;
struct StorageState;

struct PlaneId {
  int32_t number = -1;
};

// A user with idle scratch of its own. The first one is shared by everybody.
struct ScratchUser {
  int32_t number = 0;
};

// Options of a plane.
struct PlaneExtras {
  // Memory that exists already (shared with peers, or a tensor of another owner), flat and as long as the plane. The
  // whole plane rests there, on the device or on the host.
  at::Tensor memory{};
  // Names of the files of blocks that rest in files: one each, below the placement's folder; folders in between are
  // made. Where another plane has that file, a number is added. As many as blocks, or none.
  std::vector<std::string> block_files{};
  std::shared_ptr<io::RunFolder> folder{};  // for as long as a block may rest in a file
  ScratchUser copies{};                     // copies of its blocks use the limit and idle memory of this user
  // Each block has memory of its own, from occupy(), its first lease or its first view until discard(). Without memory
  // it has no contents; a lease or a view finds zeros.
  bool apart = false;
};

// Move only; any thread may release it, and it may outlive the ShardStorage.
class Lease {
 public:
  Lease() = default;
  Lease(Lease&& other) noexcept = default;
  Lease& operator=(Lease&& other) noexcept;
  ~Lease() { release(); }

  // A piece of a lease of several blocks that lie apart.
  struct Piece {
    int64_t begin;  // from this element of the range on
    at::Tensor data;
  };

  // The range, flat. To be used on the stream that was current when it was acquired, and released on that stream.
  // The tensor is undefined if there is no lease or if the lease has pieces. It is not to be used after the release.
  const at::Tensor& data() const { return data_; }
  // The blocks that have memory, of a lease of several blocks of a plane whose blocks lie apart.
  const std::vector<Piece>& pieces() const { return pieces_; }
  explicit operator bool() const { return state_ != nullptr; }

  // Writes changed elements back, and lets others use them. settle() tells later errors.
  void release() noexcept;

 private:
  friend class Leases;
  friend class ShardStorage;
  std::shared_ptr<StorageState> state_;
  at::Tensor data_;
  std::vector<Piece> pieces_;
  std::shared_ptr<Staging> staging_;  // the copy, or the scratch; null: a view of the plane's own memory
  std::shared_ptr<Plane> plane_;      // null: scratch
  int32_t first_ = 0, end_ = 0;       // blocks
  Access access_ = Access::kRead;
};

// The data of a lease, which ends when nobody refers to that memory any more.
at::Tensor as_tensor(Lease lease);

// Any thread may call anything; nothing here takes Python's lock.
class ShardStorage {
 public:
  // Throws ErrorKind::kValue for a budget that is no budget, and for transfers that are none.
  explicit ShardStorage(c10::Device device, Budget budget = {}, FileAccess files = {});
  ~ShardStorage();
  ShardStorage(const ShardStorage&) = delete;
  ShardStorage& operator=(const ShardStorage&) = delete;

  // Contents are whatever is there.
  PlaneId add(std::string name, int64_t numel, at::ScalarType type, const Placement& placement, Cuts cuts = {},
              const at::Tensor& memory = {});
  PlaneId add(std::string name, int64_t numel, at::ScalarType type, const Placement& placement, Cuts cuts,
              const PlaneExtras& extras);
  // Waits for its leases. Its memory goes unless somebody else has it.
  void remove(PlaneId plane);

  // Throws what the fetch threw; FileError with offset and bytes for a file. A block whose write back has failed has
  // no contents: every fetch of it throws that failure, until a kWrite lease of all of it.
  Lease acquire(PlaneId plane, plan::Range range, Access access, Medium at);
  // Nobody needs these blocks again, as far as the range has them whole: a file of theirs goes, and their memory where
  // they lie apart. Waits for leases. Tensors that others have of that memory keep it.
  void discard(PlaneId plane, plan::Range range);
  // Blocks that lie apart and have no memory get some, with arbitrary contents. Returns whether there were any.
  bool occupy(PlaneId plane, plan::Range range);
  bool has_memory(PlaneId plane, plan::Range range) const;  // no block of the range is without
  // A hint: exactly this range will be acquired at this medium. Dropped where a block is being written, where there is
  // no room, and when somebody changes a block before.
  void prefetch(PlaneId plane, plan::Range range, Medium at);

  // A lease of exactly this range for reading would wait for no transfer: it rests there, or has been prefetched.
  bool here(PlaneId plane, plan::Range range, Medium at) const;

  // The medium in whose memory all of the range rests, in one piece or in blocks that lie apart: a lease of it there is
  // a view, or several. Nothing: wherever it is acquired, it is a copy.
  std::optional<Medium> resting(PlaneId plane, plan::Range range) const;

  // Memory for somebody's own use, of no plane; contents are whatever was there.
  Lease scratch(int64_t numel, at::ScalarType type, Medium at, ScratchUser user = {});
  // Whether `bytes` more fit into the budget now, without waiting.
  bool has_room(Medium at, int64_t bytes) const;
  // Reuse::kNone: what it gives back returns to torch's allocator at once.
  ScratchUser add_scratch_user(Reuse reuse = Reuse::kSameSize);
  // Its scratch, the copies of its planes and its idle memory together take no more there: who would need more waits
  // for transfers, prefetches are dropped. Where nothing would end by itself it gets its memory all the same, and
  // Usage::over_budget counts it.
  void limit_scratch(Medium at, int64_t bytes, ScratchUser user);
  // Keeps so much idle scratch of that user, where the budget has said less.
  void keep_scratch(Medium at, int64_t bytes, ScratchUser user = {});
  ScratchUsage scratch_usage(Medium at, ScratchUser user) const;
  // Frees idle scratch: of one user, of all.
  void trim(ScratchUser user);
  void trim();

  // All of the plane, for as long as the plane is here: the tensor stays valid over moves, but while the plane rests
  // elsewhere it has no memory. Nothing excludes anybody. Fails for a plane that does not rest, whole, in memory. A
  // view of blocks that lie apart keeps their memory, which is theirs no longer after a move or discard().
  at::Tensor resident(PlaneId plane);
  // The same of a range that rests in one piece of memory.
  at::Tensor resident(PlaneId plane, plan::Range range);

  // From now on the planes rest there; their contents move along. Waits for leases. All are copied before the first
  // gives its memory back; when a copy fails everything is as before. `wait_each`: for each copy, not for all at once.
  void move(const std::vector<PlaneId>& planes, const Placement& placement, bool wait_each = false);
  void move(PlaneId plane, const Placement& placement) { move(std::vector<PlaneId>{plane}, placement); }
  Placement placement(PlaneId plane) const;
  std::vector<at::Tensor> memory(PlaneId plane) const;  // of its parts that can be addressed, as bytes

  // The budget of a medium from now on.
  void limit(Medium medium, int64_t bytes);
  // The process ends with this still here: files that would stay behind are removed.
  void at_exit() noexcept;

  // Waits until everything is at rest. Throws the first failure since the last call, with all others in its text.
  void settle();
  Usage usage() const;
  // Transfers of blocks are recorded from now on, or no longer; those that ended since the last take.
  void record_copies(bool on);
  std::vector<CopyRecord> take_copies();
  // The clock of the engine whose memory this is.
  const StepClockPtr& clock() const;
  c10::Device device() const;

 private:
  std::shared_ptr<StorageState> state_;
};

}  // namespace ds::storage
