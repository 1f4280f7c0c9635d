// Sharded parameters gathered together: one collective for all of them.
//
// Slices are packed into one row of a staging buffer, which is gathered; the rows of all ranks are then taken apart.
// Above `limit` bytes time goes into bytes, not into starting collectives, and the second copy and the memory of the
// staging buffer are saved: each parameter is gathered straight into its own buffer.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/util/Optional.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "zero/gathers/gather_buffers.h"
#include "zero/spaces/sharded_param.h"

namespace ds::zero {

class StagedGather {
 public:
  static constexpr int64_t kLimit = 16 << 20;

  // Starts it; every rank of `group` does, with the same parameters. `note`: a byte that each rank tells all others;
  // all ranks give one, or none does, and then there are parameters. `in_place`: parameters that are available take the
  // values where they are, when take() is called.
  StagedGather(comm::Communicator& group, GatherBuffers& buffers, std::vector<ShardedParam*> params,
               std::optional<uint8_t> note, bool in_place = false, int64_t limit = kLimit);
  ~StagedGather();  // waits
  StagedGather(const StagedGather&) = delete;
  StagedGather& operator=(const StagedGather&) = delete;

  const std::vector<ShardedParam*>& params() const { return params_; }
  // padded_numel() elements with the values of the parameter: the caller's from now on. Once for each.
  at::Tensor take(const ShardedParam& param);
  const std::vector<uint8_t>& notes();  // one of each rank; blocks the host
  int64_t collectives() const { return static_cast<int64_t>(works_.size()); }

 private:
  void arrive();
  void give_rows();

  GatherBuffers& memory_;
  std::vector<ShardedParam*> params_;
  bool in_place_;
  uint8_t note_;  // this rank's
  std::vector<comm::WorkPtr> works_;
  bool arrived_ = false;
  size_t taken_ = 0;
  at::Tensor rows_;                  // staging, bytes: a row for each rank; undefined where there is none
  std::vector<int64_t> offsets_;     // of each parameter within a row
  std::vector<at::Tensor> buffers_;  // without staging
  at::Tensor note_column_, host_notes_;
  std::optional<c10::Event> copied_;  // host_notes_ are there
  std::vector<uint8_t> notes_;
};

}  // namespace ds::zero
