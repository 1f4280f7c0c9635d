#include "zero/engine.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <unordered_set>
#include <utility>

#include "base/error.h"
#include "zero/space_rules/space_rule.h"
#include "zero/sparse_rows.h"

namespace ds::zero {

namespace {

// 64 bytes of the narrowest type: vector loads and cuBLAS want aligned starts.
constexpr int64_t kAlignNumel = 64;
// Of slices: nobody computes on them but element-wise kernels, and every small parameter pays for it.
constexpr int64_t kAlignSliceNumel = 16;

// Where gradients enter the graph of the model from outside of it, or leave it. A hook on an output would also see what
// comes from another output that was computed from it: a model that returns its loss and its logits would get the
// factor twice. What `passed` returns goes on.
class Gate : public torch::autograd::Node {
 public:
  using Passed = std::function<at::Tensor(const at::Tensor&)>;
  explicit Gate(Passed passed) : passed_(std::move(passed)) {}
  std::string name() const override { return "DeepSpeedGate"; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    return {passed_(grads.at(0))};
  }

 private:
  Passed passed_;
};

// From here on who uses `tensor` finds the gate, and behind it what `source` was computed from.
void put_gate(const at::Tensor& tensor, const at::Tensor& source, Gate::Passed passed) {
  auto gate = std::make_shared<Gate>(std::move(passed));
  gate->set_next_edges({torch::autograd::impl::gradient_edge(source)});
  gate->add_input_metadata(tensor);
  torch::autograd::impl::set_gradient_edge(tensor, {std::move(gate), 0});
}

}  // namespace

StoreOptions Engine::store_options(const std::vector<ParamSpec>& params, const EngineOptions& options) {
  StoreOptions made;
  made.policy = policy_;
  made.grad_dtype = options.grad_dtype;
  made.align = made.policy.shards_params() ? kAlignSliceNumel : kAlignNumel;
  made.everyone = dense_ranks(policy_, ranks_);
  made.ranks_of = [this](const ParamSpec& spec) { return find_space_rule(spec.rule).ranks(spec, policy_, ranks_); };
  int64_t total = 0;
  for (const ParamSpec& param : params) total += param.numel();
  made.bucket_numel = bucket_limit(options.reducer, total, ranks_.data_parallel->size());
  if (made.policy.shards_states() && !made.policy.shards_params())
    made.bucket_numel = std::max<int64_t>(1, std::min(made.bucket_numel, options.allgather_bucket_numel));
  made.allocate = [this](int64_t bytes, c10::Device device) {
    if (device.is_cpu()) peers_ = ranks_.data_parallel->peer_memory(bytes);
    if (peers_) return peers_->region(ranks_.data_parallel->rank());
    return at::zeros({bytes}, at::TensorOptions().device(device).dtype(at::kByte));
  };
  return made;
}

Engine::Engine(std::vector<ParamSpec> params, std::vector<ShardedParamPtr> others, const EngineOptions& options,
               EngineRanks ranks)
    : policy_(options.policy),
      ranks_(std::move(ranks)),
      store_(params, store_options(params, options), std::move(others)),
      device_(store_.device(), options.threads, options.kernels),
      grads_(store_, device_, options.reducer),
      stepper_(store_, device_, options.gather),
      watched_(store_.size()) {
  if (!policy_.shards_params()) return;
  const auto sharded = store_.sharded_params();
  if (!peers_ && ranks_.gathers) gathers_ = ranks_.gathers();
  if (!gathers_) gathers_ = ranks_.data_parallel;
  auto source = peers_ ? peer_source(ranks_.data_parallel, peers_) : scheduled_source(gathers_, sharded);
  grads_.set_waits(!source->looks_ahead());
  gatherer_ = std::make_unique<ParamGatherer>(sharded, std::move(source), options.gatherer);
  gatherer_->release_all();
  gatherer_->source().before_write();
  gatherer_->source().after_write();  // the shards are in place
  gatherer_->mark_persistent();
}

Engine::~Engine() = default;

std::vector<comm::CommunicatorPtr> Engine::communicators() const {
  std::vector<comm::CommunicatorPtr> used{ranks_.data_parallel};
  for (const auto& other : {ranks_.model_parallel, ranks_.replicas, gathers_})
    if (other && other != ranks_.data_parallel) used.push_back(other);
  for (const auto& entry : ranks_.others) used.push_back(entry.second);
  return used;
}

void Engine::watch() {
  for (size_t param = 0; param < store_.size(); ++param) {
    if (watched_[param] || !store_.spec(param).tensor.requires_grad()) continue;
    const ShardedParamPtr& sharded = store_.spec(param).sharded;
    const auto add = [&] {
      hooks_.add(
          store_.spec(param).tensor, [this, param] { grads_.on_grad(param); }, sharded != nullptr);
    };
    if (sharded) {
      sharded->with_shape_only(add);
    } else {
      add();
    }
    watched_[param] = true;
  }
}

StepReport Engine::end_step() {
  const StepReport found = report();
  finish_step();
  had_user_backward_ = false;
  if (std::isfinite(found.norm)) clear_grads();
  return found;
}

void Engine::begin_backward(bool reduce, const at::Tensor& root) {
  if (own_backward_) end_backward();  // it did not raise, or it would have been aborted; only its root saw no gradient
  watch();
  user_backward_ = false;
  own_backward_ = true;
  grads_.begin(reduce);
  if (!root.defined() || !root.requires_grad()) return;
  root_ = root;
  root_hook_ = root.register_hook([weak = weak_from_this()](const at::Tensor& grad) -> at::Tensor {
    if (const auto engine = weak.lock(); engine && engine->own_backward_) engine->queue_end();
    return grad;
  });
}

// From a hook or node on the root side, so that it runs when the outermost backward ends, not a re-entrant one.
void Engine::queue_end() {
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (const auto alive = weak.lock(); alive && (alive->user_backward_ || alive->own_backward_)) alive->end_backward();
  });
}

void Engine::leave_root() {
  if (root_.defined()) root_.remove_hook(root_hook_);
  root_ = at::Tensor();
}

void Engine::end_backward() {
  own_backward_ = false;
  user_backward_ = false;
  leave_root();
  if (gatherer_) {
    gatherer_->end_backward();
    gatherer_->source().drain();
  }
  grads_.end();
}

bool Engine::join_backward(bool reduce) {
  const bool none = !had_user_backward_ && !grads_.dirty();
  had_user_backward_ = false;
  // Whole gradients that are here without a backward were put here by hand, and are taken as they are.
  if (none && reduce && (!policy_.grads_on_params || !grads_.any())) {
    if (gatherer_) gatherer_->source().drain();
    grads_.join();
  }
  return none;
}

void Engine::finish_backward() {
  if (gatherer_) gatherer_->source().drain();
  grads_.finish();
}

void Engine::finish_step() {
  if (!gatherer_) return;
  gatherer_->source().after_write();
  gatherer_->refresh_persistent();
}

void Engine::begin_write() {
  hold_.wait();
  if (writing_++ == 0 && gatherer_) gatherer_->source().before_write();
}

void Engine::end_write() {
  if (--writing_ == 0) finish_step();
}

bool Engine::abort_backward() {
  own_backward_ = false;
  user_backward_ = false;
  leave_root();
  if (gatherer_) gatherer_->end_backward();
  return grads_.abort();
}

void Engine::plan_user_backward(bool reduce, double factor) {
  user_reduce_ = reduce;
  user_factor_ = factor;
}

at::Tensor Engine::gate_input(const at::Tensor& input) {
  const auto left = [weak = weak_from_this()](const at::Tensor& grad) -> at::Tensor {
    const auto engine = weak.lock();
    if (!engine || engine->own_backward_) return grad;
    const double factor = engine->gate_factor();
    return factor == 1.0 || !grad.defined() ? grad : at::div(grad, factor);
  };
  at::Tensor inside = input.detach();
  put_gate(inside, input, left);
  return inside;
}

void Engine::watch_outputs(const std::vector<at::Tensor>& outputs) {
  if (user_backward_) abort_backward();  // it raised half-way: its callback never ran
  const std::weak_ptr<Engine> weak = weak_from_this();
  const auto entered = [weak](const at::Tensor& grad) -> at::Tensor {
    const auto engine = weak.lock();
    if (!engine || engine->own_backward_) return grad;
    if (!engine->user_backward_) {
      engine->user_backward_ = engine->had_user_backward_ = true;
      engine->grads_.begin(engine->user_reduce_);
      engine->queue_end();
    }
    const double factor = engine->gate_factor();
    return factor == 1.0 || !grad.defined() ? grad : at::mul(grad, factor);
  };
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad() || !seen.insert(output.unsafeGetTensorImpl()).second) continue;
    if (output.grad_fn()) {
      put_gate(output, output, entered);  // what the model has computed from it does not meet the gate
    } else {
      output.register_hook(entered);
    }
  }
}

void Engine::assign_optimizer_grads(const std::vector<at::Tensor>& masters) {
  at::NoGradGuard no_grad;
  const std::vector<Piece>& pieces = store_.pieces();
  if (masters.size() != pieces.size())
    fail(ErrorKind::kValue, "assign_optimizer_grads: ", masters.size(), " tensors for ", pieces.size(), " pieces");
  stepper_.scale_grads(grads_);
  const float scale = stepper_.grad_scale();
  for (size_t i = 0; i < pieces.size(); ++i) {
    at::Tensor& grad = masters[i].mutable_grad();
    if (!grads_.used(pieces[i].param)) {
      grad = at::Tensor();
      continue;
    }
    const ParamSpace& space = store_.spaces()[pieces[i].space];
    const at::Tensor slot = store_.piece_view(pieces[i], space.grad);
    if (slot.scalar_type() == masters[i].scalar_type()) {
      grad = slot;
    } else {
      grad = at::empty_like(masters[i]);
      device_.copy(grad, slot, scale);
    }
    if (store_.spec(pieces[i].param).form == GradForm::kSparseRows && space.in_place) grad = as_sparse(grad);
  }
}

void Engine::take_back_grads(const std::vector<at::Tensor>& masters) {
  for (const at::Tensor& master : masters) master.mutable_grad() = at::Tensor();
}

const Buffer* Engine::buffer(ParamSpace& space, Kept kept, int slot) {
  if (kept == Kept::kMaster) return &space.master;
  return kept == Kept::kGrad ? &space.grad : stepper_.slot(space, slot);
}

std::vector<at::Tensor> Engine::pieces(Kept kept, int slot) {
  if (kept != Kept::kGrad) hold_.wait();  // the caller may write to them
  std::vector<at::Tensor> result;
  for (const Piece& piece : store_.pieces()) {
    const Buffer* from = buffer(store_.spaces()[piece.space], kept, slot);
    result.push_back(from == nullptr ? at::Tensor() : store_.piece_view(piece, *from));
  }
  return result;
}

at::Tensor Engine::local_grad(size_t param) {
  at::NoGradGuard no_grad;
  if (!grads_.has_local(param)) return {};
  const ParamSpec& spec = store_.spec(param);
  const ParamSpace& space = store_.space_of(param);
  const at::ScalarType type = space.local.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor flat = at::zeros({store_.place(param).numel}, space.local.options().dtype(type));
  const auto index = static_cast<size_t>(store_.place(param).index);
  for (size_t e = space.map.first[index]; e < space.map.first[index + 1]; ++e) {
    const plan::Extent& extent = space.map.extents[e];
    flat.narrow(0, extent.param_offset, extent.numel).copy_(space.local.narrow(0, extent.full_offset, extent.numel));
  }
  return flat.as_strided(spec.sizes(), spec.strides(), 0);
}

at::Tensor Engine::full(Kept kept, int slot, size_t param) {
  at::NoGradGuard no_grad;
  ParamSpace& space = store_.space_of(param);
  if (kept == Kept::kGrad && !grads_.used(param)) return {};
  const Buffer* found = buffer(space, kept, slot);
  if (found == nullptr) return {};
  const Buffer& from = *found;
  const at::ScalarType type = from.data.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  if (space.in_place) return store_.view(param, from.data).to(type, /*non_blocking=*/false, /*copy=*/true);
  const ParamSpec& spec = store_.spec(param);
  const at::Tensor flat = at::zeros({store_.place(param).numel}, from.data.options().dtype(type));
  const auto index = static_cast<size_t>(store_.place(param).index);
  for (size_t e = space.map.first[index]; e < space.map.first[index + 1]; ++e) {
    const plan::Extent& extent = space.map.extents[e];
    if (extent.rank != space.rank()) continue;
    flat.narrow(0, extent.param_offset, extent.numel)
        .copy_(from.data.narrow(0, space.offset_in(from, extent), extent.numel));
  }
  // Summed as integers, since all but one rank have zero bits: every value arrives as it is, minus zero included.
  const at::Tensor bits = flat.view(type == at::kDouble ? at::kLong : at::kInt);
  space.ranks().shard->all_reduce(bits, comm::ReduceOp::kSum, spec.name)->wait();
  return flat.as_strided(spec.sizes(), spec.strides(), 0);
}

void Engine::set_full(Kept kept, int slot, size_t param, const at::Tensor& value) {
  at::NoGradGuard no_grad;
  const ParamSpec& spec = store_.spec(param);
  if (value.numel() != store_.place(param).numel)
    fail(ErrorKind::kValue, "parameter '", spec.name, "' has ", store_.place(param).numel, " elements, the value ",
         value.numel());
  const at::Tensor flat = device_.flattened(value.to(store_.device()), spec.sizes(), spec.strides());
  ParamSpace& space = store_.space_of(param);
  hold_.wait();
  if (kept == Kept::kGrad) grads_.set_used(param);
  if (kept == Kept::kMaster) begin_write();
  const Buffer* found = buffer(space, kept, slot);
  if (found == nullptr)
    fail(ErrorKind::kValue, "parameter '", spec.name, "' has no optimizer state '", stepper_.slot_names()[slot], "'");
  const Buffer& to = *found;
  const auto index = static_cast<size_t>(store_.place(param).index);
  for (size_t e = space.map.first[index]; e < space.map.first[index + 1]; ++e) {
    const plan::Extent& extent = space.map.extents[e];
    const at::Tensor part = flat.narrow(0, extent.param_offset, extent.numel);
    if (kept == Kept::kMaster && space.lp.full) space.lp.data.narrow(0, extent.full_offset, extent.numel).copy_(part);
    if (extent.rank != space.rank()) continue;
    if (kept == Kept::kMaster && !space.lp.full) space.lp.data.narrow(0, extent.shard_offset, extent.numel).copy_(part);
    to.data.narrow(0, space.offset_in(to, extent), extent.numel).copy_(part);
  }
  if (kept == Kept::kMaster) end_write();
}

void Engine::broadcast(const std::vector<at::Tensor>& tensors, int root) {
  at::NoGradGuard no_grad;
  if (ranks_.data_parallel->size() == 1) return;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor sent = tensor.contiguous();
    ranks_.data_parallel->broadcast(sent, root, "values of rank 0")->wait();
    if (!sent.is_same(tensor)) tensor.detach().copy_(sent);
  }
}

void Engine::release() {
  hold_.wait();
  hooks_.clear();
  grads_.clear();
  if (gatherer_) gatherer_->end_backward();
  store_.release();
}

}  // namespace ds::zero
