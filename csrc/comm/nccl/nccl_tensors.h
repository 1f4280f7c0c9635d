// Calls of NCCL on tensors, each on the current stream of its device: what fits is checked here, so that a mistake of
// the caller breaks nothing.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/nccl/nccl_comm.h"

namespace ds::comm {

std::optional<nccl::DataType> nccl_type(at::ScalarType type);  // none: NCCL does not know it
std::vector<std::string> nccl_types();                         // by the names of torch's dtypes

class NcclTensors {
 public:
  using Splits = std::optional<std::vector<int64_t>>;  // elements for each rank; none: equal parts
  using Tensor = at::Tensor;

  NcclTensors(NcclCommPtr nccl, c10::Device device) : nccl_(std::move(nccl)), device_(device) {}
  NcclComm& nccl() { return *nccl_; }
  const NcclCommPtr& pointer() const { return nccl_; }

  // Tensors are contiguous, of one dtype and on this device, else kType or kValue with the name of the argument. `op`:
  // SUM, PRODUCT, MIN, MAX or AVG.
  void all_reduce(const Tensor& tensor, const Tensor& out, const std::string& op);
  void reduce(const Tensor& tensor, int dst, const std::string& op);
  void broadcast(const Tensor& tensor, int src);
  void all_gather(const Tensor& output, const Tensor& tensor);
  void reduce_scatter(const Tensor& output, const Tensor& tensor, const std::string& op);
  void send(const Tensor& tensor, int dst);
  void recv(const Tensor& tensor, int src);
  void all_to_all(const Tensor& output, const Tensor& tensor, const Splits& output_splits, const Splits& input_splits);
  // Bytes with their scales, see NcclComm. Splits: of output, input, output_scales, input_scales.
  void exchange_packed(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
                       const std::vector<Splits>& splits);
  void gather_packed(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs);
  void check_registered(const Tensor& tensor) const;

  // Calls in between become one launch at the end, on the stream that is current then; without `launch` none is made.
  void begin_group() { grouping_ = true; }
  void end_group(bool launch);

 private:
  using Call = std::function<void(void* stream)>;
  struct Named {
    const char* name;
    const Tensor& tensor;
  };
  nccl::DataType checked(const char* what, bool reduces, const std::vector<Named>& tensors) const;
  nccl::DataType packed(const char* what, const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs) const;
  void same_numel(const char* what, const Named& tensor, int64_t numel) const;
  std::vector<size_t> parts(const char* what, const char* name, const Splits& splits, const Tensor& tensor) const;
  std::string of(const char* what) const;  // "all_reduce of world: "
  void issue(Call call);
  void* stream() const;

  const NcclCommPtr nccl_;
  const c10::Device device_;
  bool grouping_ = false;
  std::vector<Call> calls_;
};

}  // namespace ds::comm
