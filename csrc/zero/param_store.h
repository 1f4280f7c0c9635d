// The parameters an engine trains and the flat buffers they live in.
//
// A buffer has the layout of the full space or of this rank's shard space of its plan::ShardMap. Which buffer has
// which is decided here, from the row of the stage table; everybody else asks offset_in().
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "plan/shard_map.h"
#include "zero/sharded_param.h"
#include "zero/stage_policy.h"

namespace ds::zero {

// How the gradient of a parameter travels where every rank keeps all of it (stage 0).
enum class GradForm {
  kDense,
  kRows,        // the rows that a backward has touched
  kSparseRows,  // likewise, and an optimizer of the user's gets them as a COO tensor
};

struct ParamSpec {
  at::Tensor tensor;                  // a leaf; its data moves into the flat buffer, the tensor object stays the user's
  std::string name;                   // for messages
  int32_t group;                      // index of its optimizer parameter group
  int32_t order;                      // position in the module: later ones get their gradients earlier
  bool counts_in_norm = true;         // false for the copies of a parameter that other model-parallel ranks hold, too
  ShardedParamPtr sharded = nullptr;  // stage 3: the parameter's shard; `tensor` is sharded->tensor()
  GradForm form = GradForm::kDense;
};

struct Buffer {
  at::Tensor data;    // one-dimensional
  bool full = false;  // layout: the full space, or this rank's shard
};

// Parameters of one (group, dtype, device), end to end in one index space that all of its buffers share.
struct FlatSpace {
  int32_t group;
  at::ScalarType dtype;
  std::vector<int32_t> params;  // indices into ParamStore, in layout order
  plan::ShardMap map;
  int64_t rank = 0;           // whose shard this is
  std::vector<size_t> owned;  // extents of this rank, by shard_offset
  Buffer lp;                  // the values the model computes with
  Buffer master;              // fp32; the very same tensor as lp when the model computes in fp32 (or fp64)
  Buffer grad;                // reduced gradients, of StoreOptions::grad_dtype
  at::Tensor local;  // full space: gradients not reduced yet; may be the memory of `grad`, see split_grad_buffer
  std::vector<Buffer> slots;  // optimizer states, fp32, created by the stepper

  bool narrow() const { return dtype == at::kHalf || dtype == at::kBFloat16; }
  // Position of an owned extent, or of an element run of one bucket's own row, in a buffer.
  int64_t offset_in(const Buffer& buffer, const plan::Extent& extent) const {
    return buffer.full ? extent.full_offset : extent.shard_offset;
  }
  int64_t offset_in(const Buffer& buffer, const plan::Bucket& bucket, int64_t shard_offset) const {
    return buffer.full ? map.full_offset(bucket, rank, shard_offset) : shard_offset;
  }
};

struct ParamPlace {
  int32_t space;
  int32_t index;  // within the space
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
  int64_t parts = 1;                         // shards
  int64_t rank = 0;                          // which of them is this rank's
  int64_t bucket_numel = INT64_MAX;          // limit of a bucket
  StagePolicy policy{};
  // Memory for the shards of sharded parameters, on the device: so many bytes.
  std::function<at::Tensor(int64_t, c10::Device)> allocate;
};

class ParamStore {
 public:
  // Fails for a parameter that appears twice, is no leaf or lies on another device. `others`: sharded parameters that
  // are not trained; their shards get a place beside those of the others.
  ParamStore(std::vector<ParamSpec> specs, const StoreOptions& options, std::vector<ShardedParamPtr> others = {});

  size_t size() const { return specs_.size(); }
  const ParamSpec& spec(size_t param) const { return specs_[param]; }
  const ParamPlace& place(size_t param) const { return places_[param]; }
  FlatSpace& space_of(size_t param) { return spaces_[places_[param].space]; }
  const FlatSpace& space_of(size_t param) const { return spaces_[places_[param].space]; }
  std::vector<FlatSpace>& spaces() { return spaces_; }
  const std::vector<FlatSpace>& spaces() const { return spaces_; }
  const c10::Device& device() const { return device_; }
  bool sharded() const { return options_.parts > 1 || options_.policy.shards_params(); }
  const StagePolicy& policy() const { return options_.policy; }

  // The part of a full-space buffer that belongs to the parameter, in the parameter's shape and memory order. Only
  // where parameters lie in one piece.
  at::Tensor view(size_t param, const at::Tensor& full) const;

  at::Tensor grad_view(size_t param) const { return view(param, space_of(param).grad.data); }
  at::Tensor master_view(size_t param) const { return view(param, space_of(param).master.data); }

  // What this rank owns, by parameter and then by offset. Not sharded: one piece for every parameter, empty or not.
  const std::vector<Piece>& pieces() const { return pieces_; }
  // The piece in a buffer: in the parameter's shape where nothing is sharded, one-dimensional otherwise.
  at::Tensor piece_view(const Piece& piece, const Buffer& buffer) const;

  // Makes the buffer of local gradients of every space, where it does not exist (stages 2 and 3 have none by default).
  void need_local();
  void drop_local();

  // Where states are sharded and gradients are not (stage 1), the reduced gradients lie in this rank's rows of the
  // local buffer, which costs no memory of their own. split_grad_buffer() moves them out, before more local gradients
  // come; alias_grad_buffer() forgets them and gives that memory back.
  bool grad_buffer_aliased() const;
  void split_grad_buffer();
  void alias_grad_buffer();

  // From now on gradients are kept in this type (see StoreOptions); what is there is converted.
  void set_grad_dtype(c10::optional<at::ScalarType> type);
  c10::optional<at::ScalarType> grad_dtype() const { return options_.grad_dtype; }

  // Bytes this rank holds, by what for: lp, master, grad, local, slots.
  std::vector<std::pair<std::string, int64_t>> held_bytes() const;

  // All sharded parameters: the trained ones, then the others.
  std::vector<ShardedParamPtr> sharded_params() const;

  // The parameters' own memory again, so that the model outlives the engine's buffers. Sharded ones stay so.
  void release();

 private:
  void plan_space(FlatSpace& space);
  void place_shards();
  void build_space(FlatSpace& space);
  void adopt_params(FlatSpace& space);
  at::ScalarType grad_type(const FlatSpace& space) const;

  std::vector<ParamSpec> specs_;
  std::vector<ShardedParamPtr> others_;
  StoreOptions options_;
  std::vector<ParamPlace> places_;
  std::vector<FlatSpace> spaces_;
  std::vector<Piece> pieces_;
  c10::Device device_;
};

}  // namespace ds::zero
