#include "zero/gradients/backward_session.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>
#include <utility>

#include "base/error.h"
#include "base/ranges.h"
#include "comm/c10d_compat.h"

namespace ds::zero {

namespace {

using torch::autograd::Node;

// A node of the graph through which gradients enter the model, or leave it; it passes on the result of `passed`. A hook
// on an output would also see the gradient of another output that was computed from it: a model that returns its loss
// and its logits would get the factor twice.
class GraphHook : public Node {
 public:
  using Passed = std::function<at::Tensor(const at::Tensor&)>;
  // `entered`: the session into whose model gradients come here; null: they leave it.
  GraphHook(const BackwardSession* entered, Passed passed) : entered_(entered), passed_(std::move(passed)) {}
  std::string name() const override { return "DeepSpeedGraphHook"; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    return {passed_(grads.at(0))};
  }
  const BackwardSession* entered() const { return entered_; }

 private:
  const BackwardSession* entered_;
  Passed passed_;
};

// Later uses of `tensor` lead to the hook, and from there to the node that computed `source`.
void add_graph_hook(const at::Tensor& tensor, const at::Tensor& source, const BackwardSession* entered,
                    GraphHook::Passed passed) {
  auto hook = comm::compat::make_node<GraphHook>(entered, std::move(passed));
  hook->set_next_edges({torch::autograd::impl::gradient_edge(source)});
  hook->add_input_metadata(tensor);
  torch::autograd::impl::set_gradient_edge(tensor, {std::move(hook), 0});
}

[[noreturn]] void refuse_other_ways() {
  fail(ErrorKind::kRuntime,
       "this loss.backward() reaches parameters of the model by other ways than the outputs of engine(...): a penalty "
       "on weights, a call of engine.module, a tensor that the model keeps, or gradients of torch.autograd.grad. With "
       "fp16 the loss scale comes in at the outputs alone, and those terms would lack it. Call engine.backward(loss), "
       "or engine.scale(loss).backward(), which scale the whole loss");
}

}  // namespace

void BackwardSession::register_hooks() {
  for (size_t param = 0; param < store_.size(); ++param) {
    const at::Tensor& tensor = store_.spec(param).tensor;
    if (!tensor.requires_grad() || (hooked_[param] >= 0 && !hooks_.lost(hooked_[param], tensor))) continue;
    const ShardedParamPtr& sharded = store_.spec(param).sharded;
    const auto add = [&] {
      hooked_[param] = hooks_.add(
          tensor, [this](const at::Tensor& grad) { return entering(grad); },
          [this, param] {
            const StepClock::Guest here(*store_.storage()->clock());
            failures_.guard([&] { grads_.on_grad(param); });
          },
          sharded != nullptr);
    };
    if (sharded) {
      sharded->with_shape_only(add);
    } else {
      add();
    }
  }
}

void BackwardSession::begin(bool reduce, const at::Tensor& root) {
  if (window_->own_backward()) end();  // it did not raise, or it would have been aborted; only its root saw no gradient
  if (window_->user_backward()) window_->drop_backward();  // it raised half-way
  register_hooks();
  window_->begin_own();
  grads_.begin(reduce);
  if (!root.defined() || !root.requires_grad()) return;
  root_ = root;
  root_hook_ = root.register_hook([weak = self_()](const at::Tensor& grad) -> at::Tensor {
    if (const auto session = weak.lock(); session && session->window_->own_backward()) session->queue_end();
    return grad;
  });
}

// From a hook or node on the root side, so that it runs when the outermost backward ends, not a re-entrant one.
void BackwardSession::queue_end() {
  torch::autograd::Engine::get_default_engine().queue_callback([weak = self_()] {
    const auto alive = weak.lock();
    if (!alive || !alive->window_->in_backward()) return;
    const StepClock::Guest here(*alive->store_.storage()->clock());
    alive->end();
  });
}

void BackwardSession::leave_root() {
  if (root_.defined()) root_.remove_hook(root_hook_);
  root_ = at::Tensor();
}

void BackwardSession::end() {
  const bool by_user = window_->user_backward();
  window_->end_backward();
  leave_root();
  failures_.guard([this] {
    if (gatherer_) {
      gatherer_->end_backward();
      gatherer_->drain();
    }
    grads_.end();
  });
  if (by_user) store_.storage()->clock()->leave_last(Phase::kBackward);
}

bool BackwardSession::abort() {
  if (window_->user_backward()) store_.storage()->clock()->leave_last(Phase::kBackward);
  window_->drop_backward();
  leave_root();
  if (gatherer_) gatherer_->end_backward();
  return grads_.abort();
}

bool BackwardSession::abort_together() {
  if (!grads_.reducing()) return abort();
  window_->drop_backward();
  leave_root();
  if (gatherer_) gatherer_->end_backward();
  try {
    if (gatherer_) gatherer_->drain();
    return grads_.abort_together();
  } catch (const std::exception& error) {
    failures_.tell(error);
    throw;
  }
}

bool BackwardSession::join(bool reduce) {
  const bool none = !window_->counts().has_backward() && !grads_.dirty();
  // Whole gradients that are here without a backward were put here by hand, and are taken as they are.
  if (none && reduce && (!store_.policy().grads_on_params || !grads_.any())) {
    if (gatherer_) gatherer_->drain();
    grads_.join();
  }
  return none;
}

void BackwardSession::finish() {
  if (window_->user_backward()) {
    abort_together();
    fail(ErrorKind::kRuntime, "the last backward before this step has raised, so there are no gradients to step with: ",
         "catch its error and run the next forward and backward, without a step between them");
  }
  if (gatherer_) gatherer_->drain();
  grads_.finish();
}

// ---- a backward of the user ---------------------------------------------------------------------------------------

// See [Note: the factor of a user's backward].
at::Tensor BackwardSession::entering(const at::Tensor& grad) const {
  if (window_->own_backward()) return grad;
  const WindowFactors factors = window_->factors();
  if (factors.misses_scale) refuse_other_ways();
  return factors.at_params == 1.0 ? grad : at::mul(grad, factors.at_params);
}

// Whether the running backward leaves gradients in .grad of these parameters: torch.autograd.grad does not.
bool BackwardSession::accumulates() const {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  if (!wanted || wanted->empty()) return true;
  return any_of(hooked_, [&](int64_t number) {
    if (number < 0) return false;
    const auto found = wanted->find(hooks_.node(number));
    return found != wanted->end() && found->second.needed_;
  });
}

// Whether all ways of the running backward into this model lead through outputs of forward.
bool BackwardSession::only_through_outputs() const {
  const std::unordered_set<Node*>* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (!nodes) return false;
  const auto is_output = [this](const Node* node) {
    const auto* hook = dynamic_cast<const GraphHook*>(node);
    return hook && hook->entered() == this;
  };
  const auto leaves = [](const Node* node) {
    const auto* hook = dynamic_cast<const GraphHook*>(node);
    return hook && !hook->entered();
  };
  std::unordered_set<const Node*> inside;  // nodes that gradients of outputs come to, up to where they leave the model
  std::vector<const Node*> open;
  for (const Node* node : *nodes)
    if (is_output(node)) open.push_back(node);
  while (!open.empty()) {
    const Node* const node = open.back();
    open.pop_back();
    for (const auto& edge : node->next_edges())
      if (edge.is_valid() && inside.insert(edge.function.get()).second && !leaves(edge.function.get()))
        open.push_back(edge.function.get());
  }
  std::unordered_set<const Node*> leaves_of_model;  // accumulators: nothing but the inside may lead there
  for (const int64_t number : hooked_)
    if (number >= 0) leaves_of_model.insert(hooks_.node(number));
  return none_of(*nodes, [&](const Node* node) {
    if (is_output(node) || (inside.count(node) && !leaves(node))) return false;
    return any_of(node->next_edges(), [&](const auto& edge) {
      return edge.is_valid() && !is_output(edge.function.get()) &&
             (inside.count(edge.function.get()) || leaves_of_model.count(edge.function.get()));
    });
  });
}

// A gradient has come to an output of this forward.
at::Tensor BackwardSession::enter(const at::Tensor& grad, int64_t forward) {
  if (!window_->in_backward()) {
    if (!accumulates()) {
      queue_gathers_end();
      return grad;
    }
    bool scale_at_outputs = window_->facts().missing_scale() != 1.0;
    if (scale_at_outputs && !only_through_outputs()) {
      scale_at_outputs = false;
      if (window_->facts().outside_factor == 1.0) refuse_other_ways();
    }
    window_->begin_user(scale_at_outputs);
    store_.storage()->clock()->enter(Phase::kBackward);
    grads_.begin(window_->reduces());
    queue_end();
  }
  window_->counts().reach(forward);
  const double factor = window_->own_backward() ? 1.0 : window_->factors().at_outputs;
  return factor == 1.0 || !grad.defined() ? grad : at::mul(grad, factor);
}

// torch.autograd.grad: what it has gathered goes when it ends.
void BackwardSession::queue_gathers_end() {
  if (!gatherer_ || std::exchange(gathers_end_queued_, true)) return;
  torch::autograd::Engine::get_default_engine().queue_callback([weak = self_()] {
    const auto alive = weak.lock();
    if (!alive) return;
    alive->gathers_end_queued_ = false;
    alive->failures_.guard([&] {
      alive->gatherer_->end_backward();
      alive->gatherer_->drain();
    });
  });
}

at::Tensor BackwardSession::hook_input(const at::Tensor& input) {
  const auto left = [weak = self_()](const at::Tensor& grad) -> at::Tensor {
    const auto session = weak.lock();
    if (!session || session->window_->own_backward()) return grad;
    const double factor = session->window_->factors().at_outputs;
    return factor == 1.0 || !grad.defined() ? grad : at::div(grad, factor);
  };
  at::Tensor inside = input.detach();
  add_graph_hook(inside, input, nullptr, left);
  return inside;
}

int64_t BackwardSession::forwarded(const std::vector<at::Tensor>& outputs) {
  register_hooks();
  if (window_->user_backward()) abort_together();  // it raised half-way: its callback never ran
  gathers_end_queued_ = false;
  const int64_t forward = window_->forwarded(!outputs.empty());
  hook_outputs(outputs, forward);
  return forward;
}

void BackwardSession::hook_outputs(const std::vector<at::Tensor>& outputs, int64_t forward) {
  const auto entered = [weak = self_(), forward](const at::Tensor& grad) -> at::Tensor {
    const auto session = weak.lock();
    if (!session) return grad;
    return session->enter(grad, forward);
  };
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const at::Tensor& output : outputs) {
    // A leaf, such as a parameter that the model returns, is nothing that forward has computed. Other results of the
    // model do not pass the hook.
    if (!output.requires_grad() || !output.grad_fn() || !seen.insert(output.unsafeGetTensorImpl()).second) continue;
    add_graph_hook(output, output, this, entered);
  }
}

void BackwardSession::clear_grads() {
  if (window_->in_backward()) abort_together();  // it raised half-way
  grads_.clear();
}

void BackwardSession::adopt_grads() {
  if (grads_.active()) grads_.end();
  grads_.begin(false);
  grads_.end();
}

}  // namespace ds::zero
