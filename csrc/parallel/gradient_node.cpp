#include "parallel/gradient_node.h"

#include <ATen/Functions.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <string>
#include <utility>

#include "base/ranges.h"
#include "comm/c10d_compat.h"

namespace ds::parallel {

namespace {

class GradientNode : public torch::autograd::Node {
 public:
  GradientNode(uint64_t place, torch::autograd::edge_list&& edges, std::string name,
               std::function<Tensors(Tensors)> back)
      : Node(place, std::move(edges)), name_(std::move(name)), back_(std::move(back)) {}

  std::string name() const override { return name_; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    for (size_t i = 0; i < grads.size(); ++i)
      if (!grads[i].defined()) grads[i] = input_metadata(i).zeros_like();
    Tensors found = back_(std::move(grads));
    for (size_t i = 0; i < found.size(); ++i)
      if (!should_compute_output(i)) found[i] = at::Tensor();
    return found;
  }

 private:
  const std::string name_;
  const std::function<Tensors(Tensors)> back_;
};

}  // namespace

Tensors with_gradient(const char* name, const Tensors& inputs, Tensors results, std::function<Tensors(Tensors)> back,
                      Place place) {
  if (!c10::GradMode::is_enabled()) return results;
  if (!any_of(inputs, [](const at::Tensor& input) { return input.requires_grad(); })) return results;
  const auto node = comm::compat::make_node<GradientNode>(
      place ? *place : place_now(), torch::autograd::collect_next_edges(inputs), name, std::move(back));
  for (at::Tensor& result : results) torch::autograd::set_history(result, node);
  return results;
}

at::Tensor with_gradient(const char* name, const at::Tensor& input, at::Tensor result,
                         std::function<at::Tensor(const at::Tensor&)> back, Place place) {
  const auto of_all = [back = std::move(back)](const Tensors& grads) { return Tensors{back(grads[0])}; };
  return with_gradient(name, Tensors{input}, Tensors{std::move(result)}, of_all, place)[0];
}

uint64_t place_now() { return at::sequence_number::get_and_increment(); }

at::Tensor alias_of(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return tensor.detach();
}

}  // namespace ds::parallel
