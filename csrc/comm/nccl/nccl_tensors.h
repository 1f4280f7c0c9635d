// Calls of scripts on an NCCL communicator: their tensors are checked here, so that a mistake of the caller breaks
// nothing, and the calls are made as Ops of a Communicator.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/nccl/nccl_comm.h"

namespace ds::comm {

std::optional<nccl::DataType> nccl_type(at::ScalarType type);  // none: NCCL does not know it
std::vector<std::string> nccl_types();                         // by the names of torch's dtypes

class NcclTensors {
 public:
  using Splits = std::optional<std::vector<int64_t>>;  // elements for each rank; none: equal parts
  using Tensor = at::Tensor;
  struct Named {
    const char* name;
    Tensor tensor;
  };

  // `calls`: a Communicator over `nccl` alone.
  NcclTensors(NcclCommPtr nccl, CommunicatorPtr calls, c10::Device device)
      : nccl_(std::move(nccl)), calls_(std::move(calls)), device_(device) {}
  NcclComm& nccl() { return *nccl_; }
  const NcclCommPtr& pointer() const { return nccl_; }

  // Makes a call whose results are there when the current stream gets to them. Tensors are contiguous, of one dtype and
  // on this device, else kType or kValue with the name of the argument. `reduction`: SUM, PRODUCT, MIN, MAX or AVG.
  // Splits: of the output and of the input of kAllToAll.
  void run(Verb verb, const std::optional<Named>& in, const std::optional<Named>& out, int peer = -1,
           const std::string& reduction = "SUM", const std::vector<Splits>& splits = {});
  void check_registered(const Tensor& tensor) const;

  // Calls in between become one launch at the end, on the stream that is current then; without `launch` none is made.
  void begin_group() { grouping_ = true; }
  void end_group(bool launch);

 private:
  nccl::DataType checked(const char* what, bool reduces, const std::vector<Named>& tensors) const;
  void same_numel(const char* what, const Named& tensor, int64_t numel) const;
  std::vector<int64_t> parts(const char* what, const char* name, const Splits& splits, const Tensor& tensor) const;
  std::string of(const char* what) const;  // "all_reduce of world: "
  void issue(Op op);

  const NcclCommPtr nccl_;
  const CommunicatorPtr calls_;
  const c10::Device device_;
  bool grouping_ = false;
  std::vector<Op> group_;
};

}  // namespace ds::comm
