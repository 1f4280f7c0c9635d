// Copies of slices that gathers read instead of these: codes (ZeRO++ qwZ), and a second copy of the parameters inside
// each group of ranks (hpZ).
//
// [Note: when copies follow]
// Codes are made as soon as slices have changed: nobody reads them then. A second copy takes the slices, or their
// codes, from the ranks with the same place in other groups. That is a collective of all ranks, so it happens in a
// step, and else when the first forward after the change begins, which all ranks make. Values of the slices themselves
// (GatheredParameters, checkpoints) come from the slices.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "zero/gathers/gather_buffers.h"
#include "zero/spaces/sharded_param.h"

namespace ds::zero {

class SliceCopier {
 public:
  // Returns memory of this many bytes, which the ranks may share.
  using Allocate = std::function<at::Tensor(int64_t bytes)>;

  explicit SliceCopier(std::shared_ptr<storage::ShardStorage> storage) : buffers_(std::move(storage)) {}

  // These parameters travel as codes. Those of other dtypes and those that rest as codes stay as they are.
  void add_codes(const std::vector<ShardedParamPtr>& params, const SliceCodecPtr& codec, const Allocate& allocate);
  // These have a second copy, cut over a group of ranks. `outer`: the ranks with this rank's place in each group. After
  // add_codes().
  void add_second(const std::vector<ShardedParamPtr>& params, comm::CommunicatorPtr outer, const Allocate& allocate);
  static bool can_be_coded(const ShardedParam& param);

  // The slices have changed, on all ranks. `renew`: second copies follow at once.
  void follow_slices(bool renew);
  // The user has written to these slices of this rank.
  void recode(const std::vector<ShardedParam*>& params);
  void invalidate() { stale_ = second_.empty() ? stale_ : true; }  // on all ranks
  bool stale() const { return stale_; }
  // Every rank calls it. start() sends, finish() waits for what arrives.
  void start();
  void finish();
  bool pending() const { return !started_.empty(); }

 private:
  // Parameters whose rows travel together, staged.
  struct Started {
    comm::WorkPtr work;
    at::Tensor rows;  // undefined: they arrive in the copies
    std::vector<ShardedParam*> params;
  };
  void encode(const std::vector<ShardedParam*>& params) const;
  void start_staged(const std::vector<ShardedParam*>& params);
  void start_in_copies();
  static std::vector<int64_t> offsets(const std::vector<ShardedParam*>& params);

  GatherBuffers buffers_;
  std::vector<ShardedParamPtr> coded_, second_;
  comm::CommunicatorPtr outer_;
  std::vector<Started> started_;
  bool stale_ = false;
};
using SliceCopierPtr = std::shared_ptr<SliceCopier>;

}  // namespace ds::zero
