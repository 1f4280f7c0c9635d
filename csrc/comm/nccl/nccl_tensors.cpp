#include "comm/nccl/nccl_tensors.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <numeric>
#include <utility>

#include "base/error.h"
#include "comm/nccl/native_stream.h"
#include "comm/boards/record.h"

namespace ds::comm {

namespace {

constexpr std::pair<const char*, nccl::DataType> kTypes[] = {
    {"int8", nccl::kInt8},
    {"uint8", nccl::kUint8},
    {"int32", nccl::kInt32},
    {"uint32", nccl::kUint32},
    {"int64", nccl::kInt64},
    {"uint64", nccl::kUint64},
    {"float16", nccl::kFloat16},
    {"float32", nccl::kFloat32},
    {"float64", nccl::kFloat64},
    {"bfloat16", nccl::kBfloat16},
    {"float8_e4m3fn", nccl::kFloat8E4M3},
    {"float8_e5m2", nccl::kFloat8E5M2},
};
constexpr std::pair<const char*, nccl::RedOp> kReductions[] = {
    {"SUM", nccl::kSum}, {"PRODUCT", nccl::kProd}, {"MAX", nccl::kMax}, {"MIN", nccl::kMin}, {"AVG", nccl::kAvg},
};

std::string name_of(at::ScalarType type) { return type_name(static_cast<int32_t>(type)); }

nccl::RedOp reduction_of(const std::string& name) {
  for (const auto& [known, op] : kReductions)
    if (name == known) return op;
  fail(ErrorKind::kValue, "NCCL does not reduce with ", name, "; it has SUM, PRODUCT, MAX, MIN, AVG.");
}

size_t numel_of(const at::Tensor& tensor) { return static_cast<size_t>(tensor.numel()); }

}  // namespace

std::optional<nccl::DataType> nccl_type(at::ScalarType type) {
  const std::string name = type == at::kBool ? "uint8" : name_of(type);
  for (const auto& [known, kind] : kTypes)
    if (name == known) return kind;
  return std::nullopt;
}

std::vector<std::string> nccl_types() {
  std::vector<std::string> names{"bool"};
  for (const auto& [name, kind] : kTypes) names.emplace_back(name);
  return names;
}

std::string NcclTensors::of(const char* what) const { return std::string(what) + " of " + nccl_->name() + ": "; }

nccl::DataType NcclTensors::checked(const char* what, bool reduces, const std::vector<Named>& tensors) const {
  const Named& first = tensors[0];
  for (const auto& [name, tensor] : tensors) {
    const at::ScalarType type = tensor.scalar_type();
    if (!nccl_type(type) || (reduces && type == at::kBool)) {
      std::string known;
      for (const auto& [each, kind] : kTypes) known += std::string(known.empty() ? "" : ", ") + "torch." + each;
      fail(ErrorKind::kType, of(what), name, " has dtype torch.", name_of(type), "; NCCL knows ", known,
           reduces ? "" : ", torch.bool", ". What only moves can travel as tensor.view(torch.uint8).");
    }
    if (tensor.device() != device_)
      fail(ErrorKind::kValue, of(what), name, " is on ", tensor.device().str(),
           ", but this communicator moves memory of ", device_.str(),
           ". Move the tensor there; what is on the CPU can travel through torch.distributed.");
    if (tensor.layout() != at::kStrided || !tensor.is_contiguous())
      fail(ErrorKind::kValue, of(what), name, " is not contiguous; pass ", name, ".contiguous().");
    if (type != first.tensor.scalar_type())
      fail(ErrorKind::kType, of(what), first.name, " has dtype torch.", name_of(first.tensor.scalar_type()), " and ",
           name, " torch.", name_of(type), "; they must be the same.");
  }
  return *nccl_type(first.tensor.scalar_type());
}

void NcclTensors::same_numel(const char* what, const Named& tensor, int64_t numel) const {
  if (tensor.tensor.numel() != numel)
    fail(ErrorKind::kValue, of(what), tensor.name, " has ", tensor.tensor.numel(), " elements; on ", nccl_->size(),
         " ranks it must have ", numel, ".");
}

std::vector<size_t> NcclTensors::parts(const char* what, const char* name, const Splits& splits,
                                       const Tensor& tensor) const {
  const int64_t numel = tensor.numel(), n = nccl_->size();
  if (!splits) {
    if (numel % n)
      fail(ErrorKind::kValue, of(what), numel, " elements cannot be cut into ", n,
           " equal parts, one for each rank; pass ", name, ".");
    return std::vector<size_t>(static_cast<size_t>(n), static_cast<size_t>(numel / n));
  }
  bool fit =
      static_cast<int64_t>(splits->size()) == n && std::accumulate(splits->begin(), splits->end(), int64_t{0}) == numel;
  std::string text;
  for (const int64_t each : *splits) {
    fit = fit && each >= 0;
    text += (text.empty() ? "" : ", ") + std::to_string(each);
  }
  if (!fit)
    fail(ErrorKind::kValue, of(what), name, " is [", text, "]; it must have ", n,
         " numbers, one for each rank, that make up the tensor's ", numel, " elements.");
  return {splits->begin(), splits->end()};
}

void* NcclTensors::stream() const {
  if (device_.is_cpu()) return nullptr;
  return native_stream(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
}

void NcclTensors::issue(Call call) {
  if (!grouping_) return call(stream());
  calls_.push_back(std::move(call));
}

void NcclTensors::end_group(bool launch) {
  grouping_ = false;
  const std::vector<Call> calls = std::exchange(calls_, {});
  if (!launch || calls.empty()) return;
  void* const on = stream();
  nccl_->grouped([&] {
    for (const Call& call : calls) call(on);
  });
}

void NcclTensors::all_reduce(const Tensor& tensor, const Tensor& out, const std::string& op) {
  const nccl::DataType type = checked("all_reduce", true, {{"tensor", tensor}, {"out", out}});
  same_numel("all_reduce", {"out", out}, tensor.numel());
  issue([=, op = reduction_of(op)](void* on) {
    nccl_->all_reduce(tensor.data_ptr(), out.data_ptr(), numel_of(tensor), type, op, on);
  });
}

void NcclTensors::reduce(const Tensor& tensor, int dst, const std::string& op) {
  const nccl::DataType type = checked("reduce", true, {{"tensor", tensor}});
  issue([=, op = reduction_of(op)](void* on) {
    nccl_->reduce(tensor.data_ptr(), tensor.data_ptr(), numel_of(tensor), type, op, dst, on);
  });
}

void NcclTensors::broadcast(const Tensor& tensor, int src) {
  const nccl::DataType type = checked("broadcast", false, {{"tensor", tensor}});
  issue([=](void* on) { nccl_->broadcast(tensor.data_ptr(), tensor.data_ptr(), numel_of(tensor), type, src, on); });
}

void NcclTensors::all_gather(const Tensor& output, const Tensor& tensor) {
  const nccl::DataType type = checked("all_gather", false, {{"output", output}, {"tensor", tensor}});
  same_numel("all_gather", {"output", output}, tensor.numel() * nccl_->size());
  issue([=](void* on) { nccl_->all_gather(tensor.data_ptr(), output.data_ptr(), numel_of(tensor), type, on); });
}

void NcclTensors::reduce_scatter(const Tensor& output, const Tensor& tensor, const std::string& op) {
  const nccl::DataType type = checked("reduce_scatter", true, {{"output", output}, {"tensor", tensor}});
  same_numel("reduce_scatter", {"tensor", tensor}, output.numel() * nccl_->size());
  issue([=, op = reduction_of(op)](void* on) {
    nccl_->reduce_scatter(tensor.data_ptr(), output.data_ptr(), numel_of(output), type, op, on);
  });
}

void NcclTensors::send(const Tensor& tensor, int dst) {
  const nccl::DataType type = checked("send", false, {{"tensor", tensor}});
  issue([=](void* on) { nccl_->send(tensor.data_ptr(), numel_of(tensor), type, dst, on); });
}

void NcclTensors::recv(const Tensor& tensor, int src) {
  const nccl::DataType type = checked("recv", false, {{"tensor", tensor}});
  issue([=](void* on) { nccl_->recv(tensor.data_ptr(), numel_of(tensor), type, src, on); });
}

void NcclTensors::all_to_all(const Tensor& output, const Tensor& tensor, const Splits& output_splits,
                             const Splits& input_splits) {
  const char* const what = "all_to_all";
  const nccl::DataType type = checked(what, false, {{"output", output}, {"tensor", tensor}});
  const auto given = parts(what, "input_splits", input_splits, tensor);
  const auto taken = parts(what, "output_splits", output_splits, output);
  issue([=](void* on) { nccl_->all_to_all(tensor.data_ptr(), given, output.data_ptr(), taken, type, on); });
}

nccl::DataType NcclTensors::packed(const char* what, const std::vector<Tensor>& outputs,
                                   const std::vector<Tensor>& inputs) const {
  for (const Named& each : {Named{"output", outputs[0]}, Named{"packed", inputs[0]}})
    if (each.tensor.scalar_type() != at::kByte)
      fail(ErrorKind::kType, of(what), each.name, " has dtype torch.", name_of(each.tensor.scalar_type()),
           "; packed chunks are torch.uint8. What only moves can travel as tensor.view(torch.uint8).");
  checked(what, false, {{"output", outputs[0]}, {"packed", inputs[0]}});
  return checked(what, false, {{"output_scales", outputs[1]}, {"scales", inputs[1]}});
}

void NcclTensors::exchange_packed(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
                                  const std::vector<Splits>& splits) {
  const char* const what = "exchange_packed";
  const nccl::DataType type = packed(what, outputs, inputs);
  const auto taken = parts(what, "output_splits", splits[0], outputs[0]);
  const auto given = parts(what, "input_splits", splits[1], inputs[0]);
  const auto taken_scales = parts(what, "output_scale_splits", splits[2], outputs[1]);
  const auto given_scales = parts(what, "input_scale_splits", splits[3], inputs[1]);
  issue([=](void* on) {
    nccl_->exchange_packed({inputs[0].data_ptr(), inputs[1].data_ptr(), given, given_scales},
                           {outputs[0].data_ptr(), outputs[1].data_ptr(), taken, taken_scales}, type, on);
  });
}

void NcclTensors::gather_packed(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs) {
  const char* const what = "gather_packed";
  const nccl::DataType type = packed(what, outputs, inputs);
  same_numel(what, {"output", outputs[0]}, inputs[0].numel() * nccl_->size());
  same_numel(what, {"output_scales", outputs[1]}, inputs[1].numel() * nccl_->size());
  issue([=](void* on) {
    nccl_->gather_packed(inputs[0].data_ptr(), numel_of(inputs[0]), inputs[1].data_ptr(), numel_of(inputs[1]),
                         outputs[0].data_ptr(), outputs[1].data_ptr(), type, on);
  });
}

void NcclTensors::check_registered(const Tensor& tensor) const {
  checked("register", false, {{"tensor", tensor}});
  if (tensor.numel() == 0) fail(ErrorKind::kValue, "register got an empty tensor: there is no memory to register.");
}

}  // namespace ds::comm
