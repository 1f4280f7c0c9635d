#include "zero/engine.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>

#include "base/error.h"

namespace ds::zero {

namespace {

// 64 bytes of the narrowest type: vector loads and cuBLAS want aligned starts.
constexpr int64_t kAlignNumel = 64;

}  // namespace

Engine::Engine(std::vector<ParamSpec> params, EngineOptions options, comm::CommunicatorPtr data_parallel,
               comm::CommunicatorPtr model_parallel)
    : policy_(stage_policy(options.stage)),
      data_parallel_(std::move(data_parallel)),
      model_parallel_(std::move(model_parallel)),
      store_(std::move(params), options.grad_dtype, kAlignNumel, policy_.shard_states ? data_parallel_->size() : 1),
      device_(store_.device(), options.threads),
      grads_(store_, device_, data_parallel_, options.reducer),
      stepper_(store_, device_),
      watched_(store_.size()) {}

Engine::~Engine() = default;

void Engine::watch() {
  for (size_t param = 0; param < store_.size(); ++param) {
    if (watched_[param] || !store_.spec(param).tensor.requires_grad()) continue;
    hooks_.add(store_.spec(param).tensor, [this, param] { grads_.on_grad(param); });
    watched_[param] = true;
  }
}

void Engine::begin_backward(bool reduce) {
  user_backward_ = false;
  own_backward_ = true;
  grads_.begin(reduce);
}

void Engine::end_backward() {
  own_backward_ = false;
  user_backward_ = false;
  grads_.end();
}

bool Engine::abort_backward() {
  own_backward_ = false;
  user_backward_ = false;
  return grads_.abort();
}

void Engine::plan_user_backward(bool reduce, double factor) {
  user_reduce_ = reduce;
  user_factor_ = factor;
}

void Engine::watch_outputs(const std::vector<at::Tensor>& outputs) {
  if (user_backward_) abort_backward();  // it raised half-way: its callback never ran
  const std::weak_ptr<Engine> weak = weak_from_this();
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) continue;
    output.register_hook([weak](const at::Tensor& grad) -> at::Tensor {
      const auto engine = weak.lock();
      if (!engine || engine->own_backward_) return grad;
      if (!engine->user_backward_) {
        engine->user_backward_ = true;
        engine->grads_.begin(engine->user_reduce_);
        // Queued from a hook on the root side, so it runs when the outermost backward ends, not a re-entrant one.
        torch::autograd::Engine::get_default_engine().queue_callback([weak] {
          if (const auto alive = weak.lock(); alive && alive->user_backward_) alive->end_backward();
        });
      }
      const double factor = engine->user_factor_;
      return factor == 1.0 || !grad.defined() ? grad : at::mul(grad, factor);
    });
  }
}

void Engine::hand_out_grads(const std::vector<at::Tensor>& masters) {
  at::NoGradGuard no_grad;
  if (masters.size() != store_.size())
    fail(ErrorKind::kValue, "hand_out_grads: ", masters.size(), " tensors for ", store_.size(), " parameters");
  for (size_t param = 0; param < masters.size(); ++param) {
    at::Tensor& grad = masters[param].mutable_grad();
    if (!grads_.used(param)) {
      grad = at::Tensor();
      continue;
    }
    const at::Tensor slot = store_.grad_view(param);
    grad = slot.scalar_type() == masters[param].scalar_type() ? slot : slot.to(masters[param].scalar_type());
  }
}

void Engine::broadcast(const std::vector<at::Tensor>& tensors, int root) {
  at::NoGradGuard no_grad;
  if (data_parallel_->size() == 1) return;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor sent = tensor.contiguous();
    data_parallel_->broadcast(sent, root)->wait();
    if (!sent.is_same(tensor)) tensor.detach().copy_(sent);
  }
}

void Engine::release() {
  hooks_.clear();
  grads_.clear();
  store_.release();
}

}  // namespace ds::zero
