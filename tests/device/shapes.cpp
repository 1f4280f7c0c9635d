#include "shapes.h"

#include <ATen/ops/empty.h>

#include <unordered_map>

namespace standin {

namespace {

using torch::jit::Stack;

at::Tensor made(at::IntArrayRef sizes, at::ScalarType type) {
  return at::empty(sizes, at::TensorOptions().device(at::kMeta).dtype(type));
}

at::Tensor like(const at::Tensor& tensor) { return made(tensor.sizes(), tensor.scalar_type()); }

using Results = c10::optional<Stack>;
using Rule = Results (*)(const Stack&);

Results layer_norm(const Stack& given) {  // input, normalized_shape, weight, bias, eps
  const at::Tensor input = given[0].toTensor();
  std::vector<int64_t> rows = input.sizes().vec();
  const size_t normalized = given[1].toListRef().size();
  std::fill(rows.end() - static_cast<std::ptrdiff_t>(normalized), rows.end(), 1);
  const at::ScalarType sums = input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return Stack{like(input), made(rows, sums), made(rows, sums)};
}

Results layer_norm_backward(const Stack& given) {  // grad, input, normalized_shape, mean, rstd, weight, bias, mask
  const c10::List<bool> mask = given[7].toBoolList();
  Stack results;
  for (size_t i = 0; i < 3; ++i) {
    const c10::IValue& of = given[i == 0 ? 1 : 4 + i];
    const bool wanted = mask[i] && of.isTensor() && of.toTensor().defined();
    results.emplace_back(wanted ? like(of.toTensor()) : at::Tensor());
  }
  return results;
}

Results embedding_backward(const Stack& given) {  // grad, indices, num_weights, padding_idx, scale_grad_by_freq
  const at::Tensor grad = given[0].toTensor();
  return Stack{made({given[2].toInt(), grad.size(-1)}, grad.scalar_type())};
}

Results nll_loss(const Stack& given) {  // self, target, weight, reduction, ignore_index
  const at::Tensor self = given[0].toTensor();
  if (self.dim() != 2 || given[3].toInt() == 0) return c10::nullopt;
  return Stack{made({}, self.scalar_type()), made({}, self.scalar_type())};
}

Results nll_loss_backward(const Stack& given) {  // grad, self, target, weight, reduction, ignore_index, total_weight
  return Stack{like(given[1].toTensor())};
}

}  // namespace

Results known_results(const std::string& name, const Stack& arguments) {
  static const std::unordered_map<std::string, Rule> rules = {
      {"aten::native_layer_norm", &layer_norm},
      {"aten::native_layer_norm_backward", &layer_norm_backward},
      {"aten::embedding_dense_backward", &embedding_backward},
      {"aten::nll_loss_forward", &nll_loss},
      {"aten::nll_loss_backward", &nll_loss_backward},
  };
  const auto rule = rules.find(name);
  return rule == rules.end() ? c10::nullopt : rule->second(arguments);
}

}  // namespace standin
