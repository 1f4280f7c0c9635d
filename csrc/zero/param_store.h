// The parameters an engine trains and the flat buffers they live in.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "plan/shard_map.h"

namespace ds::zero {

struct ParamSpec {
  at::Tensor tensor;           // a leaf; its data moves into the flat buffer, the tensor object stays the user's
  std::string name;            // for messages
  int32_t group;               // index of its optimizer parameter group
  int32_t order;               // position in the module: later ones get their gradients earlier
  bool counts_in_norm = true;  // false for the copies of a parameter that other model-parallel ranks hold, too
};

// Parameters of one (group, dtype, device), end to end in one flat index space that all of its buffers share.
struct FlatSpace {
  int32_t group;
  at::ScalarType dtype;
  std::vector<int32_t> params;  // indices into ParamStore, in layout order
  plan::FlatLayout layout;
  plan::ShardMap shards;
  at::Tensor lp;                  // the values the model computes with
  at::Tensor master;              // fp32; the very same tensor as lp when the model computes in fp32 (or fp64)
  at::Tensor grad;                // of the accumulation dtype
  std::vector<at::Tensor> slots;  // optimizer states, fp32, created by the stepper
};

struct ParamPlace {
  int32_t space;
  int32_t index;  // within the space
  int64_t offset, numel;
};

class ParamStore {
 public:
  // `align` elements between parameter starts, `parts` shards. `grad_dtype` undefined: fp32 for 16-bit parameters,
  // the parameter's own otherwise. Fails for a parameter that appears twice, is no leaf or lies on another device.
  ParamStore(std::vector<ParamSpec> specs, c10::optional<at::ScalarType> grad_dtype, int64_t align, int64_t parts);

  size_t size() const { return specs_.size(); }
  const ParamSpec& spec(size_t param) const { return specs_[param]; }
  const ParamPlace& place(size_t param) const { return places_[param]; }
  std::vector<FlatSpace>& spaces() { return spaces_; }
  const std::vector<FlatSpace>& spaces() const { return spaces_; }
  const c10::Device& device() const { return device_; }

  // The part of a flat buffer of the parameter's space that belongs to it, in the parameter's shape and memory order.
  at::Tensor view(size_t param, const at::Tensor& flat) const;
  at::Tensor grad_view(size_t param) const { return view(param, spaces_[places_[param].space].grad); }
  at::Tensor master_view(size_t param) const { return view(param, spaces_[places_[param].space].master); }

  // The parameters' own memory again, so that the model outlives the engine's buffers.
  void release();

 private:
  std::vector<ParamSpec> specs_;
  std::vector<ParamPlace> places_;
  std::vector<FlatSpace> spaces_;
  c10::Device device_;
};

}  // namespace ds::zero
