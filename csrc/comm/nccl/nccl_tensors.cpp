#include "comm/nccl/nccl_tensors.h"

#include <utility>

#include "base/error.h"
#include "base/ranges.h"
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
constexpr std::pair<const char*, ReduceOp> kReductions[] = {
    {"SUM", ReduceOp::kSum}, {"PRODUCT", ReduceOp::kProduct}, {"MAX", ReduceOp::kMax},
    {"MIN", ReduceOp::kMin}, {"AVG", ReduceOp::kAvg},
};

std::string name_of(at::ScalarType type) { return type_name(static_cast<int32_t>(type)); }

ReduceOp reduction_of(const std::string& name) {
  for (const auto& [known, op] : kReductions)
    if (name == known) return op;
  fail(ErrorKind::kValue, "NCCL does not reduce with ", name, "; it has SUM, PRODUCT, MAX, MIN, AVG.");
}

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
  const nccl::DataType type = *nccl_type(first.tensor.scalar_type());
  if (reduces) nccl_->check_reduction(what, type);
  return type;
}

void NcclTensors::same_numel(const char* what, const Named& tensor, int64_t numel) const {
  if (tensor.tensor.numel() != numel)
    fail(ErrorKind::kValue, of(what), tensor.name, " has ", tensor.tensor.numel(), " elements; on ", nccl_->size(),
         " ranks it must have ", numel, ".");
}

std::vector<int64_t> NcclTensors::parts(const char* what, const char* name, const Splits& splits,
                                        const Tensor& tensor) const {
  const int64_t numel = tensor.numel(), n = nccl_->size();
  if (!splits) {
    if (numel % n)
      fail(ErrorKind::kValue, of(what), numel, " elements cannot be cut into ", n,
           " equal parts, one for each rank; pass ", name, ".");
    return {};
  }
  bool fit = static_cast<int64_t>(splits->size()) == n && sum_of(*splits) == numel;
  std::string text;
  for (const int64_t each : *splits) {
    fit = fit && each >= 0;
    text += (text.empty() ? "" : ", ") + std::to_string(each);
  }
  if (!fit)
    fail(ErrorKind::kValue, of(what), name, " is [", text, "]; it must have ", n,
         " numbers, one for each rank, that make up the tensor's ", numel, " elements.");
  return *splits;
}

void NcclTensors::issue(Op op) {
  if (grouping_) return group_.push_back(std::move(op));
  calls_->run(op)->wait();
}

void NcclTensors::end_group(bool launch) {
  grouping_ = false;
  const std::vector<Op> ops = std::exchange(group_, {});
  if (launch && !ops.empty()) calls_->run_all(ops)->wait();
}

void NcclTensors::run(Verb verb, const std::optional<Named>& in, const std::optional<Named>& out, int peer,
                      const std::string& reduction, const std::vector<Splits>& splits) {
  const char* const what = verb_name(verb);
  std::vector<Named> tensors;
  for (const auto* each : {&out, &in})
    if (*each) tensors.push_back(**each);
  if (verb == Verb::kAllReduce && in) std::swap(tensors[0], tensors[1]);
  checked(what, reduces(verb), tensors);
  if (verb == Verb::kAllGather) same_numel(what, *out, in->tensor.numel() * nccl_->size());
  if (verb == Verb::kReduceScatter) same_numel(what, *in, out->tensor.numel() * nccl_->size());
  Op op{verb, in ? in->tensor : Tensor(), out ? out->tensor : Tensor(), {}, {}, reduction_of(reduction), peer};
  if (verb == Verb::kAllToAll) {
    op.in_counts = parts(what, "input_splits", splits[1], op.in);
    op.out_counts = parts(what, "output_splits", splits[0], op.out);
  }
  if (verb == Verb::kAllReduce && in) {
    same_numel(what, *out, in->tensor.numel());
    if (!op.in.is_same(op.out)) op.out.view({-1}).copy_(op.in.view({-1}));
    op.in = Tensor();
  }
  issue(std::move(op));
}

void NcclTensors::check_registered(const Tensor& tensor) const {
  checked("register", false, {{"tensor", tensor}});
  if (tensor.numel() == 0) fail(ErrorKind::kValue, "register got an empty tensor: there is no memory to register.");
}

}  // namespace ds::comm
