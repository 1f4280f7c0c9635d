#include "zero/engine.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <utility>

#include "base/error.h"
#include "base/process.h"
#include "base/ranges.h"
#include "plan/memory_plan.h"
#include "storage/meta_memory.h"

namespace ds::zero {

namespace {

// 64 bytes of the narrowest type: vector loads and cuBLAS want aligned starts.
constexpr int64_t kAlignNumel = 64;
// The alignment of slices: only element-wise kernels read them, and every small parameter pays for the padding.
constexpr int64_t kAlignSliceNumel = 16;

// Numbers that the optimizer keeps in planes, of each element.
int64_t slots_of(const OptimizerRules& rules, int32_t group) {
  constexpr int64_t kMost = 2;  // of the rules there are
  if (group >= static_cast<int32_t>(rules.size())) return kMost;
  return rules[group] == nullptr ? 0 : static_cast<int64_t>(rules[group]->slots.size());
}

// The bytes of the states of this rank.
StateBytes bytes_of_states(const std::vector<ParamSpec>& params, const comm::Communicator& ranks,
                           const EngineOptions& options) {
  StateBytes found;
  for (const ParamSpec& param : params) {
    const int64_t own = (param.numel() + ranks.size() - 1) / ranks.size();
    found.grad += own * static_cast<int64_t>(c10::elementSize(options.grad_dtype.value_or(param.tensor.scalar_type())));
    found.master += own * 4;
    found.slots += own * 4 * slots_of(options.rules, param.group);
    found.weight += own * static_cast<int64_t>(c10::elementSize(param.tensor.scalar_type()));
  }
  return found;
}

// Numbers that say what was written into the parameters that all ranks have alike, one for each.
Agreement::Numbers written_values(ParamGatherer& gatherer, const std::vector<ShardedParamPtr>& alike, bool all) {
  Agreement::Numbers found;
  for (const ShardedParamPtr& param : alike) {
    const bool written = gatherer.written(*param);
    if (!written && !all) continue;
    found.emplace_back("the checksum of what was written into parameter '" + param->name() + "'",
                       written ? param->checksum() : 0.0);
  }
  return found;
}

}  // namespace

StoreOptions Engine::store_options(const std::vector<ParamSpec>& params, const EngineOptions& options) {
  StoreOptions made;
  made.policy = policy_;
  made.placements = options.placements;
  made.param_offload = options.param_offload;
  made.files = options.files;
  made.swapping = options.swapping;
  made.budget = options.budget;
  made.grad_dtype = options.grad_dtype;
  made.align = made.policy.shards_params() ? kAlignSliceNumel : kAlignNumel;
  made.everyone = spaces_->everyone();
  made.ranks_of = [this](const ParamSpec& spec) { return spaces_->of(spec.rule, spec.copied_along); };
  int64_t total = 0;
  for (const ParamSpec& param : params) total += param.numel();
  const bool on_host = all_of(params, [](const ParamSpec& param) { return storage::computes_on_host(param.device()); });
  made.bucket_numel = bucket_limit(options.reducer, total, spaces_->data_parallel()->size(), on_host);
  if (made.policy.shards_states() && !made.policy.shards_params())
    made.bucket_numel = std::max<int64_t>(1, std::min(made.bucket_numel, options.allgather_bucket_numel));
  if (options.memory && !params.empty()) {
    const storage::Placement lp = made.placements.lp;
    const StateBytes need = bytes_of_states(params, *made.everyone.shard, options);
    made.placements = auto_placements(need, rated(need, *options.memory, params.front().tensor.device(), options.files,
                                                  *spaces_->data_parallel(), options.threads));
    made.placements.lp = lp;
  }
  if (made.placements.moves_params()) {
    // A step leases the rows of a bucket: one is written back while the next one is computed.
    const ParamOffload& offload = made.param_offload;
    made.bucket_numel = std::min(made.bucket_numel, options.swapping.bucket_numel);
    if (offload.limited()) {
      const int64_t row = std::max<int64_t>(1, offload.buffers / 2) * offload.buffer_numel;
      made.bucket_numel = std::min(made.bucket_numel, row * spaces_->data_parallel()->size());
    }
    made.bucket_numel = std::max<int64_t>(1, made.bucket_numel);
  }
  if (made.placements.moves_states())
    made.bucket_numel = std::min({made.bucket_numel, options.swapping.bucket_numel, plan::moved_bucket_limit(total)});
  made.allocate = [this](int64_t bytes, c10::Device device, const comm::CommunicatorPtr& ranks) {
    return slices_.allocate(bytes, device, ranks);
  };
  return made;
}

namespace {

// Frozen slices rest as codes before they get memory.
std::vector<ShardedParamPtr> others_of(std::vector<ShardedParamPtr> others, const EngineOptions& options) {
  if (!options.codes_frozen || others.empty()) return others;
  const SliceCodecPtr codec = SliceCodec::resting(others.front()->device(), options.threads);
  for (const ShardedParamPtr& other : others) other->rest_as_codes(codec);
  return others;
}

}  // namespace

Engine::Engine(std::vector<ParamSpec> params, std::vector<ShardedParamPtr> others, const EngineOptions& options,
               MeshSpacesPtr spaces, std::shared_ptr<Window> window)
    : policy_(options.policy),
      spaces_(std::move(spaces)),
      slices_(options.codes_weights, options.threads),
      store_(params, store_options(params, options), others_of(std::move(others), options)),
      device_(store_.device(), options.threads, options.kernels),
      grads_(store_, device_, options.reducer),
      stepper_(store_, device_, options.gather),
      strategy_(make_strategy(options.strategy, {store_, device_, grads_, &stepper_, options.step})),
      backward_(store_, grads_, window ? std::move(window) : std::make_shared<Window>(), gatherer_, failures_,
                [this] {
                  const auto alive = weak_from_this().lock();
                  return alive ? std::shared_ptr<BackwardSession>(alive, &backward_) : nullptr;
                }),
      writes_(store_,
              [this] {
                strategy_->settle();
                states_.hold().wait();
              }),
      states_(store_, device_, grads_, stepper_, *strategy_, gatherer_, writes_) {
  if (store_.device().is_cpu()) keep_freed_memory();
  meet_where_files_are();
  backward_.window()->facts().each_micro_step = policy_.reduce == ReduceAt::kMicroStep;
  grads_.tell(strategy_->arrivals());
  grads_.ask_local([this] { return stepper_.compressed().local(); });
  stepper_.set_beside(strategy_->runs_beside());
  if (!policy_.shards_params()) return;
  const auto sharded = store_.sharded_params();
  const SliceCopierPtr copies = slices_.make_copies(store_);
  auto source = slices_.source(store_);
  grads_.options().waits = !source->looks_ahead();
  GathererOptions gathering = options.gatherer;
  gathering.clock = store_.storage()->clock();
  gathering.keeps_writes = true;
  gathering.on_failure = [this](const std::exception& error) { tell_others(error); };
  gatherer_ = std::make_unique<ParamGatherer>(sharded, std::move(source), std::move(gathering));
  gatherer_->use_copies(copies);
  std::vector<ShardedParamPtr> alike;
  for (const ShardedGroup& group : store_.sharded_groups())
    if (same_ranks(group.ranks.shard, store_.everyone().shard)) append(alike, group.params);
  grads_.agreement().ask([this, alike](bool all) { return written_values(*gatherer_, alike, all); });
  gatherer_->release_all();
  gatherer_->before_change();
  gatherer_->publish(/*renew=*/true);  // the shards have their values
  gatherer_->mark_persistent();
}

Engine::~Engine() = default;

// One rank alone may fail to make its files, and opening a communicator cannot be aborted.
void Engine::meet_where_files_are() const {
  const auto in_files = [](const ParamSpace& space) {
    const Placements& placements = space.key.placements;
    return placements.master.in_files() || placements.grad.in_files() || placements.slot.in_files() ||
           placements.lp.in_files();
  };
  if (none_of(store_.spaces(), in_files)) return;
  store_.storage()->settle();
  spaces_->data_parallel()->barrier();
}

StepReport Engine::step(const StepInputs& inputs) {
  return failures_.guard([&] {
    try {
      return make_step(inputs);
    } catch (const c10::OutOfMemoryError& error) {  // after the ranks have agreed: the others are updating
      throw LoneFailure(ErrorKind::kRuntime,
                        std::string("there is no memory for the step: ") + error.what_without_backtrace());
    }
  });
}

// They wait for this rank in a collective, or will: all that this engine has fail with its error.
void Engine::tell_others(const std::exception& error) const {
  spaces_->abort(lone_text(*spaces_->data_parallel(), error));
}

namespace {

// Undoes the preparation of a client optimizer that has failed, so that its step can be tried again. Gradients that
// were multiplied by `factor` in place (those of the masters' type) are divided by it, and .grad of the masters is
// `shown`, its value before: at stage 0 a parameter without .grad has no gradient.
void restore_grads(ParamStore& store, const GradReducer& grads, StateAccess& states,
                   const std::vector<at::Tensor>& masters, const std::vector<at::Tensor>& shown, float factor) {
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < masters.size(); ++i) masters[i].mutable_grad() = shown[i];
  // A factor of 0 or NaN, from a norm that is not finite, cannot be undone: such gradients are of no use anyway.
  const float inverse = 1.0f / factor;
  if (factor == 1.0f || !std::isfinite(inverse)) return;
  for (size_t number = 0; number < store.pieces().size(); ++number) {
    const Piece& piece = store.pieces()[number];
    const ParamSpace& space = store.spaces()[piece.space];
    if (!grads.used(piece.param) || space.grad.dtype != space.master.dtype) continue;
    const auto [lease, grad] = states.piece(StateKind::kGrad, 0, number, storage::Access::kUpdate);
    if (grad.defined()) grad.mul_(inverse);
  }
}

}  // namespace

StepReport Engine::make_step(const StepInputs& inputs) {
  backward_.finish();
  if (gatherer_) gatherer_->settle_copies();
  writes_.bring_home();
  stepper_.norm(grads_, inputs.loss_scale, inputs.max_norm, inputs.check);
  const bool known_skipped = inputs.norm_first && inputs.check && stepper_.report().skipped;
  if (inputs.before_update && !known_skipped) inputs.before_update();
  states_.hold().wait();
  writes_.adopt();  // after the norm no rank reads slices any more
  if (!inputs.outside) {
    stepper_.update(grads_, strategy_->parts(inputs), inputs.hyper);
  } else if (!stepper_.report().skipped) {
    std::vector<at::Tensor> shown;
    for (const at::Tensor& master : inputs.masters) shown.push_back(master.grad());
    states_.assign_optimizer_grads(inputs.masters);
    try {
      inputs.outside();
    } catch (...) {
      restore_grads(store_, grads_, states_, inputs.masters, shown, stepper_.grad_scale());
      throw;
    }
    states_.take_back_grads(inputs.masters);
    stepper_.publish();
  }
  StepReport report = stepper_.report();
  report.written = writes_.take_names();
  states_.finish_step();
  if (!std::isfinite(report.norm) && inputs.name_nonfinite) report.nonfinite = nonfinite_grads();
  backward_.clear_grads();
  if (inputs.scaler) {
    try {
      report.loss_scale = optim::next_loss_scale(inputs.scaler->first, inputs.scaler->second, report.skipped);
    } catch (const Error&) {  // the caller asks again, when it has said which gradients it was
    }
  }
  return report;
}

std::vector<std::string> Engine::unused_params() {
  return failures_.guard([&] {
    backward_.finish();
    std::vector<std::string> names;
    for (size_t param = 0; param < store_.size(); ++param)
      if (!grads_.used(param)) names.push_back(store_.spec(param).name);
    return names;
  });
}

// Before the reduction where that is known, else in what this rank owns of the sum.
std::vector<std::pair<std::string, std::string>> Engine::nonfinite_grads() {
  std::vector<std::pair<std::string, std::string>> found;
  for (const NonfiniteGrad& one : grads_.local_nonfinite_grads())
    found.emplace_back(store_.spec(one.param).name, one.nan ? "nan" : "inf");
  if (!found.empty()) return found;
  at::NoGradGuard no_grad;
  for (const Piece& piece : store_.pieces()) {
    if (!grads_.used(piece.param)) continue;
    const ParamSpace& space = store_.spaces()[piece.space];
    const auto [lease, grad] = store_.piece_lease(piece, space.grad, storage::Access::kRead);  // it may be anywhere
    if (!at::isfinite(grad).all().item<bool>())
      found.emplace_back(store_.spec(piece.param).name, at::isnan(grad).any().item<bool>() ? "nan" : "inf");
  }
  return found;
}

void Engine::broadcast(const std::vector<at::Tensor>& tensors, int root) {
  at::NoGradGuard no_grad;
  if (spaces_->data_parallel()->size() == 1) return;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor sent = tensor.contiguous();
    spaces_->data_parallel()->broadcast(sent, root, "values of rank 0")->wait();
    if (!sent.is_same(tensor)) tensor.detach().copy_(sent);
  }
}

void Engine::code_frozen() {
  failures_.guard([&] {
    if (!gatherer_) return;
    WriteScope scope(states_);
    slices_.code_frozen(store_, *gatherer_, [this] { writes_.adopt(); });
    scope.close();
  });
}

void Engine::set_rules(std::vector<const optim::Rule*> by_group) {
  for (const optim::Rule* rule : by_group) strategy_->check(*rule);
  stepper_.set_rules(std::move(by_group));
}

void Engine::expect(const StepInputs& inputs) {
  failures_.guard([&] {
    stepper_.compressed().expect(inputs.hyper);
    if (!strategy_->expects()) return;
    writes_.bring_home();
    if (!policy_.shards_params()) writes_.adopt();
    strategy_->expect(inputs);
  });
}

void Engine::clear_grads() {
  failures_.guard([&] {
    strategy_->forget();
    backward_.clear_grads();
  });
}

void Engine::release() {
  std::exception_ptr failed;  // beside the training; all else is done first
  try {
    strategy_->settle();
  } catch (...) {
    failed = std::current_exception();
  }
  states_.hold().wait();
  backward_.release();
  grads_.clear();
  if (gatherer_) gatherer_->end_backward();
  store_.release();
  if (failed) std::rethrow_exception(failed);
}

}  // namespace ds::zero
