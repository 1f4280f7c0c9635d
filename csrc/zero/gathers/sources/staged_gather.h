// Sharded parameters gathered together.
//
// Where a communicator takes several tensors in one call (Communicator::groups()), each slice is gathered straight into
// the buffer of its parameter, by one call for all of them and without a copy. Elsewhere starting a call costs more
// than copying: slices are packed into one row of a staging buffer, which is gathered, and the rows of all ranks are
// then taken apart. Above `limit` bytes time goes into bytes, and the second copy and the memory of the staging buffer
// are saved: each parameter has a call of its own. Rows of codes arrive in memory of their own in all cases, and those
// of all parameters are taken apart together. So do rows of several slices, unless a call takes several tensors and
// the slices are few: then each slice is a tensor of the call.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "zero/gathers/gather_buffers.h"
#include "zero/gathers/row_reader.h"
#include "zero/spaces/sharded_param.h"

namespace ds::zero {

class StagedGather {
 public:
  static constexpr int64_t kLimit = 16 << 20;

  // Starts it; every rank of `group` does, with the same parameters. `in_place`: parameters that are available take the
  // values where they are, when take() is called.
  StagedGather(comm::Communicator& group, GatherBuffers& buffers, std::vector<ShardedParam*> params,
               Values values = Values::kUsed, bool in_place = false, int64_t limit = kLimit);
  ~StagedGather();  // waits
  StagedGather(const StagedGather&) = delete;
  StagedGather& operator=(const StagedGather&) = delete;

  const std::vector<ShardedParam*>& params() const { return params_; }
  // padded_numel() elements with the values of the parameter: the caller's from now on. Once for each.
  at::Tensor take(const ShardedParam& param);
  int64_t collectives() const { return static_cast<int64_t>(works_.size()); }

 private:
  void stage(comm::Communicator& group, int64_t row, c10::Device device);
  void start_in_buffers(comm::Communicator& group);
  void wait();
  void arrive();  // waits, and takes rows apart
  at::Tensor buffer_of(const ShardedParam& param) const;
  bool is_direct(const ShardedParam& param) const;  // its values arrive where they belong

  GatherBuffers& memory_;
  std::vector<ShardedParam*> params_;
  const Values values_;
  const int64_t ranks_;
  bool in_place_, in_pieces_ = false;  // several slices of a row can be gathered in one call
  std::vector<comm::WorkPtr> works_;
  bool waited_ = false, arrived_ = false;
  size_t taken_ = 0;
  at::Tensor rows_;                   // staging, bytes: a row for each rank; undefined where there is none
  std::vector<int64_t> offsets_;      // of each parameter within a row
  std::vector<at::Tensor> buffers_;   // of each parameter: without staging, and where rows have been taken apart
  std::vector<at::Tensor> own_rows_;  // without staging: of each parameter whose rows are taken apart
};

}  // namespace ds::zero
