// The parameters an engine trains and the flat buffers they live in.
//
// A buffer has the layout of the full space or of this rank's shard space of its plan::ShardMap. Which buffer has
// which is decided here, from the row of the stage table; other code asks offset_in().
//
// [Note: memory of gradients]
// Gradients on the device exist from their backward to the step. Each bucket of them has memory of its own, which it
// gets when the first of its gradients arrives, or from leases and views, and which free_grads() gives back. On the CPU
// memory stays once it is there, since new pages would cost more than a step saves.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "zero/spaces/offloaded_params.h"
#include "zero/spaces/param_space.h"
#include "zero/spaces/param_spec.h"
#include "zero/stage_policy.h"

namespace ds::zero {

// Spaces that are reduced over the same ranks.
struct SpaceSet {
  SpaceRanks ranks;
  std::vector<size_t> spaces;
  std::vector<int32_t> params;
};

struct ParamPosition {
  int32_t space;
  size_t index;  // within the space
  int64_t numel;
};

// A piece of a parameter that this rank owns: what an optimizer sees.
struct Piece {
  int32_t param;
  int32_t space;
  int64_t param_offset, numel;
  size_t extent;
};

struct StoreOptions {
  c10::optional<at::ScalarType> grad_dtype;  // unset: the parameter's own; parameters in fp64 have theirs in any case
  int64_t align = 64;                        // elements between parameter starts
  int64_t bucket_numel = INT64_MAX;          // limit of a bucket
  StagePolicy policy{};
  Placements placements;
  ParamOffload param_offload{};
  storage::FileAccess files{};
  Swapping swapping;
  storage::Budget budget;                                // of all memory that the engine has
  SpaceRanks everyone;                                   // reaches all ranks of the engine
  std::function<SpaceRanks(const ParamSpec&)> ranks_of;  // unset: everyone
  // Allocates memory for the shards of sharded parameters that rest on the device, or on the host beside a CPU: bytes,
  // device, and the ranks that share it.
  std::function<at::Tensor(int64_t, c10::Device, const comm::CommunicatorPtr&)> allocate;
};

// Sharded parameters that lie in one piece of memory.
struct ShardedGroup {
  SpaceRanks ranks;
  std::vector<ShardedParamPtr> params;
  bool trained = true;
};

class ParamStore {
 public:
  // Fails for a parameter that appears twice, is no leaf or lies on another device. `others`: sharded parameters that
  // are not trained; their shards get memory beside those of the others.
  ParamStore(std::vector<ParamSpec> specs, const StoreOptions& options, std::vector<ShardedParamPtr> others = {});
  ~ParamStore();  // parameters that rest in planes keep the storage; all other buffers go

  size_t size() const { return specs_.size(); }
  const ParamSpec& spec(size_t param) const { return specs_[param]; }
  const ParamPosition& position(size_t param) const { return positions_[param]; }
  ParamSpace& space_of(size_t param) { return spaces_[positions_[param].space]; }
  const ParamSpace& space_of(size_t param) const { return spaces_[positions_[param].space]; }
  std::vector<ParamSpace>& spaces() { return spaces_; }
  const std::vector<ParamSpace>& spaces() const { return spaces_; }
  const c10::Device& device() const { return device_; }
  const std::shared_ptr<storage::ShardStorage>& storage() const { return storage_; }  // of all buffers and scratch
  const std::shared_ptr<io::Files>& files() const { return options_.files.files; }    // null: the storage has its own
  // Everyone's first, whether it has spaces or not.
  const std::vector<SpaceSet>& sets() const { return sets_; }
  const SpaceRanks& everyone() const { return options_.everyone; }
  bool alone() const;  // no parameter is reduced over other ranks
  const StagePolicy& policy() const { return options_.policy; }
  const Swapping& swapping() const { return options_.swapping; }
  int64_t largest_row() const;  // elements of the largest bucket that this rank owns

  // The part of a full-space buffer on the device that belongs to the parameter, in the parameter's shape and memory
  // order. Only where parameters are in one piece.
  at::Tensor view(size_t param, const Buffer& full) const;
  // The same with a storage of its own, as parameters have: others that refer to it are seen, and can be left with it.
  at::Tensor own_grad_view(size_t param) const;
  // After the plane of gradients has moved, or has got memory: such a view has the memory that is there now, if any.
  void follow_move(const at::Tensor& own_grad_view, size_t param) const;
  void empty_view(const at::Tensor& own_grad_view) const;  // it has no memory any more
  // A tensor with a storage of its own, which nobody here uses any more: its memory is its own, with the same values.
  void leave_with_values(const at::Tensor& own) const;

  // See [Note: a storage for each parameter]. Whether the data of a parameter is its view of the flat buffer.
  bool at_home(size_t param) const;
  // The view takes the value, and the parameter returns to it. References to the old data keep the old values. Fails
  // for another shape or dtype, and names the parameter.
  void bring_home(size_t param, const at::Tensor& value);
  void follow_moves();                          // after planes of parameters have moved
  std::vector<at::Tensor> flat_params() const;  // the buffers in which whole parameters lie

  // The pieces that this rank owns, by parameter and then by offset. In place: one piece for every parameter, empty or
  // not.
  const std::vector<Piece>& pieces() const { return pieces_; }
  // The piece in a buffer: in the parameter's shape where its space is in place, one-dimensional otherwise. Of a piece
  // in a file nothing but shape and type: a tensor of the device "meta".
  at::Tensor piece_view(const Piece& piece, const Buffer& buffer) const;
  // The same as long as the lease is held, in its tier; on the host if kernels cannot address that.
  std::pair<storage::Lease, at::Tensor> piece_lease(const Piece& piece, const Buffer& buffer,
                                                    storage::Access access) const;

  // A buffer of a space: blocks end where this rank's row of a bucket begins or ends. Its contents are zero.
  // `copies`: whose limit and idle memory the copies of its blocks have.
  Buffer make_buffer(const ParamSpace& space, const char* name, at::ScalarType dtype, bool full,
                     const storage::Placement& placement = {}, storage::ScratchUser copies = {});
  // The same of gradients. On the device they have no memory yet.
  Buffer make_grads(const ParamSpace& space, const char* name, at::ScalarType dtype, bool full,
                    const storage::Placement& placement = {});
  // Elements of one bucket of a buffer that rests on the device. New memory is zero.
  at::Tensor on_device(const Buffer& buffer, plan::Range range) const;
  // The buffer has memory for these elements of a bucket. Returns whether that is new; then its contents are arbitrary.
  bool occupy(const Buffer& buffer, plan::Range range) const;
  // This rank's row of reduced gradients of a bucket, on the device, for a caller that writes all of it.
  at::Tensor grad_row_to_write(const ParamSpace& space, const plan::Bucket& bucket) const;
  bool frees_grads() const;   // on the CPU they keep their memory
  void free_grads();          // nobody needs the gradients any more
  void drop(Buffer& buffer);  // waits for its leases
  // Elements of it, leased in their tier; on the host if kernels cannot address that.
  storage::Lease lease(const Buffer& buffer, plan::Range range, storage::Access access) const;

  // Makes the buffer of local gradients of every space, where it does not exist (where reduced ones are kept apart
  // there is none by default).
  void need_local();
  void drop_local();

  // If states are sharded and gradients are not (stage 1), the reduced gradients lie in this rank's rows of the
  // local buffer, which costs no memory of their own. split_grad_buffer() moves them out, before more local gradients
  // come; alias_grad_buffer() forgets them and gives that memory back.
  bool grad_buffer_aliased() const;
  void split_grad_buffer();
  void alias_grad_buffer();
  // Gradients on the device go on in memory of their own: what had them is still being read and written.
  void renew_grad_buffers();

  // From now on gradients are kept in this type (see StoreOptions); what is there is converted.
  void set_grad_dtype(c10::optional<at::ScalarType> type);
  c10::optional<at::ScalarType> grad_dtype() const { return options_.grad_dtype; }

  // Planes of one kind (lp, master, grad, local, slots) and their sizes in bytes. Planes inside memory that others own
  // are left out.
  std::vector<std::pair<storage::PlaneId, int64_t>> planes(const std::string& what) const;
  int64_t absent_grad_bytes() const;  // of gradients on the device that have no memory now
  // Bytes this rank holds in a step, by what for: lp, master, grad, local, slots.
  std::vector<std::pair<std::string, int64_t>> held_bytes() const;

  const std::vector<ShardedParamPtr>& others() const { return others_; }  // sharded ones that are not trained
  // All sharded parameters: the trained ones, then the others.
  std::vector<ShardedParamPtr> sharded_params() const;
  // They again, by the ranks among which they are sharded, everyone's first, and by whether they are trained.
  // StoreOptions::allocate was called for each. The first one is there in any case.
  std::vector<ShardedGroup> sharded_groups() const;
  // Slices of parameters that are not trained go to other memory of StoreOptions::allocate, called for each of their
  // groups again.
  void rehome_others();

  // The parameters' own memory again, so that the model outlives the engine's buffers. Sharded ones stay so.
  void release();

 private:
  void check_slices() const;
  void make_home(size_t param, at::IntArrayRef sizes, at::IntArrayRef strides);
  bool home_is_here(size_t param) const;
  void plan_space(ParamSpace& space);
  void allocate_shards();
  void allocate_others(const ShardedGroup& group);
  bool in_shared_memory() const;  // slices rest where StoreOptions::allocate has memory
  SpaceRanks ranks_of_other(const ShardedParam& other) const;
  void build_space(ParamSpace& space);
  void fill_masters(ParamSpace& space);
  storage::PlaneId add_plane(const ParamSpace& space, const char* name, const Buffer& buffer,
                             const storage::Placement& placement, storage::PlaneExtras extras);
  Buffer copied(const ParamSpace& space, const char* name, const Buffer& from, at::ScalarType dtype);
  void adopt_params(ParamSpace& space);
  at::ScalarType grad_type(const ParamSpace& space) const;
  plan::Range block_of(size_t param, const Buffer& buffer) const;  // that of the parameter's bucket
  void limit_leaving();                                            // gradients on their way from the device
  int64_t rest_on_host() const;                                    // bytes, where there is a limit
  void widen(int64_t bytes);                                       // the limit of the host's memory
  plan::Range range_of(const Piece& piece, const Buffer& buffer) const;
  at::Tensor shaped(const Piece& piece, const at::Tensor& flat) const;
  // Reduced gradients have a buffer of their own.
  bool keeps_grads_apart(const ParamSpace& space) const {
    return options_.policy.shards_grads() || space.key.placements.moves_grads();
  }

  std::vector<ParamSpec> specs_;
  std::vector<ShardedParamPtr> others_;
  StoreOptions options_;
  std::vector<ParamPosition> positions_;
  std::vector<ParamSpace> spaces_;
  std::vector<SpaceSet> sets_;
  std::vector<Piece> pieces_;
  c10::Device device_;
  std::shared_ptr<storage::ShardStorage> storage_;
  storage::ScratchUser grad_copies_;             // copies of reduced gradients
  std::shared_ptr<io::RunFolder> state_folder_;  // of files of masters, gradients and states
  std::unique_ptr<OffloadedParams> offloaded_;   // null: slices rest on the device
  int64_t host_limit_ = 0;  // bytes of the host for resting blocks and buffers of files; 0: not configured
};

}  // namespace ds::zero
