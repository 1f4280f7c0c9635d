#include "zero/gradients/backward_session.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>
#include <utility>

#include "base/error.h"
#include "comm/c10d_compat.h"

namespace ds::zero {

namespace {

// A node of the graph through which gradients enter the model, or leave it; it passes on the result of `passed`. A hook
// on an output would also see the gradient of another output that was computed from it: a model that returns its loss
// and its logits would get the factor twice.
class GraphHook : public torch::autograd::Node {
 public:
  using Passed = std::function<at::Tensor(const at::Tensor&)>;
  explicit GraphHook(Passed passed) : passed_(std::move(passed)) {}
  std::string name() const override { return "DeepSpeedGraphHook"; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    return {passed_(grads.at(0))};
  }

 private:
  Passed passed_;
};

// Later uses of `tensor` lead to the hook, and from there to the node that computed `source`.
void add_graph_hook(const at::Tensor& tensor, const at::Tensor& source, GraphHook::Passed passed) {
  auto hook = comm::compat::make_node<GraphHook>(std::move(passed));
  hook->set_next_edges({torch::autograd::impl::gradient_edge(source)});
  hook->add_input_metadata(tensor);
  torch::autograd::impl::set_gradient_edge(tensor, {std::move(hook), 0});
}

}  // namespace

void BackwardSession::register_hooks() {
  for (size_t param = 0; param < store_.size(); ++param) {
    const at::Tensor& tensor = store_.spec(param).tensor;
    if (!tensor.requires_grad() || (hooked_[param] >= 0 && !hooks_.lost(hooked_[param], tensor))) continue;
    const ShardedParamPtr& sharded = store_.spec(param).sharded;
    const auto add = [&] {
      hooked_[param] = hooks_.add(
          tensor,
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
  if (own_backward_) end();  // it did not raise, or it would have been aborted; only its root saw no gradient
  register_hooks();
  user_backward_ = false;
  own_backward_ = true;
  grads_.begin(reduce);
  if (!root.defined() || !root.requires_grad()) return;
  root_ = root;
  root_hook_ = root.register_hook([weak = self_()](const at::Tensor& grad) -> at::Tensor {
    if (const auto session = weak.lock(); session && session->own_backward_) session->queue_end();
    return grad;
  });
}

// From a hook or node on the root side, so that it runs when the outermost backward ends, not a re-entrant one.
void BackwardSession::queue_end() {
  torch::autograd::Engine::get_default_engine().queue_callback([weak = self_()] {
    const auto alive = weak.lock();
    if (!alive || !(alive->user_backward_ || alive->own_backward_)) return;
    const StepClock::Guest here(*alive->store_.storage()->clock());
    alive->end();
  });
}

void BackwardSession::forget_reached() {
  const std::lock_guard<std::mutex> lock(reached_mutex_);
  reaching_.clear();
}

void BackwardSession::leave_root() {
  if (root_.defined()) root_.remove_hook(root_hook_);
  root_ = at::Tensor();
}

void BackwardSession::end() {
  {
    const std::lock_guard<std::mutex> lock(reached_mutex_);
    reached_.merge(std::exchange(reaching_, {}));
  }
  own_backward_ = false;
  const bool by_user = user_backward_;
  user_backward_ = false;
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
  forget_reached();
  own_backward_ = false;
  if (user_backward_) store_.storage()->clock()->leave_last(Phase::kBackward);
  user_backward_ = false;
  leave_root();
  if (gatherer_) gatherer_->end_backward();
  return grads_.abort();
}

bool BackwardSession::abort_together() {
  if (!grads_.reducing()) return abort();
  forget_reached();
  own_backward_ = false;
  user_backward_ = false;
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
  const bool none = !had_user_backward_ && !grads_.dirty();
  had_user_backward_ = false;
  // Whole gradients that are here without a backward were put here by hand, and are taken as they are.
  if (none && reduce && (!store_.policy().grads_on_params || !grads_.any())) {
    if (gatherer_) gatherer_->drain();
    grads_.join();
  }
  return none;
}

void BackwardSession::finish() {
  if (user_backward_) {
    abort_together();
    fail(ErrorKind::kRuntime, "the last backward before this step has raised, so there are no gradients to step with: ",
         "catch its error and run the next forward and backward, without a step between them");
  }
  if (gatherer_) gatherer_->drain();
  grads_.finish();
}

at::Tensor BackwardSession::hook_input(const at::Tensor& input) {
  const auto left = [weak = self_()](const at::Tensor& grad) -> at::Tensor {
    const auto session = weak.lock();
    if (!session || session->own_backward_) return grad;
    const double factor = session->hook_factor();
    return factor == 1.0 || !grad.defined() ? grad : at::div(grad, factor);
  };
  at::Tensor inside = input.detach();
  add_graph_hook(inside, input, left);
  return inside;
}

void BackwardSession::hook_outputs(const std::vector<at::Tensor>& outputs) {
  if (user_backward_) abort_together();  // it raised half-way: its callback never ran
  const std::weak_ptr<BackwardSession> weak = self_();
  const auto entered = [weak, forward = forwards_](const at::Tensor& grad) -> at::Tensor {
    const auto session = weak.lock();
    if (!session) return grad;
    {
      const std::lock_guard<std::mutex> lock(session->reached_mutex_);
      session->reaching_.insert(forward);
    }
    if (session->own_backward_) return grad;
    if (!session->user_backward_) {
      session->user_backward_ = session->had_user_backward_ = true;
      session->store_.storage()->clock()->enter(Phase::kBackward);
      session->grads_.begin(session->user_reduce_);
      session->queue_end();
    }
    const double factor = session->hook_factor();
    return factor == 1.0 || !grad.defined() ? grad : at::mul(grad, factor);
  };
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad() || !seen.insert(output.unsafeGetTensorImpl()).second) continue;
    if (output.grad_fn()) {
      add_graph_hook(output, output, entered);  // other results of the model do not pass the hook
    } else {
      output.register_hook(entered);
    }
  }
}

void BackwardSession::clear_grads() {
  if (user_backward_ || own_backward_) abort_together();  // it raised half-way
  grads_.clear();
}

void BackwardSession::adopt_grads() {
  if (grads_.active()) grads_.end();
  grads_.begin(false);
  grads_.end();
}

}  // namespace ds::zero
