// Slices of parameters that rest on the host or in files (offload_param): one plane for each space, with one block for
// each slice, so that a gather of one parameter fetches only its block.
#pragma once
#include <memory>
#include <vector>

#include "io/folders/run_folder.h"
#include "zero/offload/placements.h"
#include "zero/spaces/sharded_param.h"

namespace ds::zero {

class OffloadedParams {
 public:
  struct Slice {
    ShardedParam* param;
    int64_t begin;  // in the plane: behind that of the one before, padding included
  };

  // `largest`: elements that the largest slice of all takes, where that is known.
  OffloadedParams(std::shared_ptr<storage::ShardStorage> storage, const storage::Placement& placement,
                  const ParamOffload& options, int64_t largest = 0);

  // Adds a plane and moves the slices there, one after the other. `memory`: undefined, or what the plane rests in.
  // Throws ErrorKind::kValue for a slice that is larger than a buffer, with the size that works.
  storage::PlaneId add(const char* name, const std::vector<Slice>& slices, int64_t numel, at::ScalarType type,
                       const at::Tensor& memory);
  int64_t limit() const { return limit_; }  // bytes of copies on the host, at most; 0: not configured
  // A plane for one slice, which goes when the slice leaves it.
  void add_alone(const char* name, ShardedParam& param, const at::Tensor& memory);

 private:
  storage::PlaneId add(const char* name, const std::vector<Slice>& slices, int64_t numel, at::ScalarType type,
                       const at::Tensor& memory, bool alone);
  storage::Placement placement_for(const storage::Cuts& ends);

  const std::shared_ptr<storage::ShardStorage> storage_;
  const storage::Placement placement_;
  const ParamOffload options_;
  const int64_t largest_;
  int64_t host_left_;                      // elements that may still rest on the host
  std::shared_ptr<io::RunFolder> folder_;  // of files
  storage::ScratchUser copies_;
  int64_t limit_ = 0;  // of copies on the host, bytes
};

}  // namespace ds::zero
