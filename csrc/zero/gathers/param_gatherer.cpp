#include "zero/gathers/param_gatherer.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "base/ranges.h"
#include "storage/fence.h"

namespace ds::zero {

ParamGatherer::ParamGatherer(std::vector<ShardedParamPtr> params, ShardSourcePtr source, GathererOptions options)
    : params_(std::move(params)), source_(std::move(source)), options_(options), alive_(std::make_shared<bool>(true)) {
  for (const ShardedParamPtr& param : params_) {
    if (param->available()) live_ += param->numel();
    offloaded_ = offloaded_ || param->offloaded();
  }
  peak_live_ = live_;
}

ParamGatherer::~ParamGatherer() { *alive_ = false; }

int32_t ParamGatherer::add_unit(std::string name, std::vector<ShardedParamPtr> params, int32_t block) {
  Unit unit;
  unit.name = std::move(name);
  unit.block = block;
  for (const ShardedParamPtr& param : params) {
    unit.params.push_back(param.get());
    unit.numel += param->numel();
  }
  allow_pool(unit);
  units_.push_back(std::move(unit));
  return static_cast<int32_t>(units_.size()) - 1;
}

void ParamGatherer::extend_unit(int32_t index, ShardedParamPtr param) {
  Unit& unit = units_.at(index);
  if (contains(unit.params, param.get())) return;
  unit.params.push_back(param.get());
  unit.numel += param->numel();
  allow_pool(unit);
}

void ParamGatherer::use_source(ShardSourcePtr source) {
  source_ = std::move(source);
  for (const Unit& unit : units_) allow_pool(unit);
}

// The pool may keep buffers of the largest unit; what stays gathered never comes back to it.
void ParamGatherer::allow_pool(const Unit& unit) {
  int64_t bytes = 0;
  for (const ShardedParam* param : unit.params)
    if (!param->persistent) bytes += param->padded_numel() * static_cast<int64_t>(c10::elementSize(param->dtype()));
  source_->buffers().keep_two_of(bytes);
}

void ParamGatherer::leave_out(const std::vector<ShardedParam*>& params) {
  left_out_ = {params.begin(), params.end()};
  source_->leave_out(params);
}

bool ParamGatherer::left_out(const Unit& unit) const {
  return !left_out_.empty() && all_of(unit.params, [&](const ShardedParam* param) { return left_out_.count(param); });
}

// ---- holding ------------------------------------------------------------------------------------------------------

void ParamGatherer::hold(const std::vector<ShardedParam*>& params, bool ahead, Values values) {
  std::vector<ShardedParam*> absent;
  int64_t numel = 0;
  for (ShardedParam* param : params) {
    ++param->holders;
    if (values == Values::kExact) ++param->exact_holders;
    if (param->shows(values) || written(*param)) continue;
    absent.push_back(param);
    if (!param->available()) numel += param->numel();
  }
  if (absent.empty()) return;
  if (live_ + numel > options_.max_live_numel) release_all();
  with_slices([&] {
    if (values == Values::kUsed) need_copies();
    source_->gather(absent, ahead && source_->looks_ahead() ? wanted_next() : std::vector<ShardedParam*>{}, values);
  });
  ++fetches_;
  live_ += numel;
  peak_live_ = std::max(peak_live_, live_);
}

void ParamGatherer::let_go(const std::vector<ShardedParam*>& params, bool keep) {
  const bool model_goes_on = in_forward_ && live_ <= options_.max_live_numel;
  std::vector<ShardedParam*> free;
  for (ShardedParam* param : params) {
    if (param->holders > 0) --param->holders;
    const bool stays = keep || (model_goes_on && used_outside_.count(param));
    if (param->holders == 0 && !stays && param->available()) free.push_back(param);
  }
  if (free.empty()) return;
  const StatusScope together(*free.front());
  for (ShardedParam* param : free) drop(*param);
}

bool ParamGatherer::written(ShardedParam& param) {
  if (!param.available()) return false;
  if (param.data_given && !param.kept) param.kept = source_->differs(param);
  return param.kept || param.written();
}

void ParamGatherer::forget_written(ShardedParam& param) {
  param.know_values();
  param.data_given = false;
}

void ParamGatherer::drop(ShardedParam& param) {
  if (!param.available()) return;
  if (param.is_own_slice()) {
    // The slice has the values. The masters, if there are any, take them before the next step.
    if (param.written() || param.data_given) {
      param.write_back();
      param.note_slice_written();
    }
  } else if (options_.keeps_writes && written(param)) {
    return;  // until the slices have taken the values
  }
  live_ -= param.numel();
  param.release();
}

// Where a gather needs all ranks, they enter this together, and each must find the same parameters absent: what a rank
// keeps or has started for branches of its own does not count.
void ParamGatherer::acquire(const std::vector<ShardedParam*>& params) {
  if (source_->looks_ahead()) {
    source_->forget_ahead();
    for (ShardedParam* param : params)
      if (param->holders == 0) drop(*param);
  }
  hold(params, /*ahead=*/false, Values::kExact);
}

// Parameters that modules hold, too, show what these compute with again: now, or when copies have followed the slices.
void ParamGatherer::release(const std::vector<ShardedParam*>& params) {
  for (ShardedParam* param : params) --param->exact_holders;
  let_go(params, false);
  if (copies_ && copies_->stale()) return;
  std::vector<ShardedParam*> held;
  for (ShardedParam* param : params)
    if (param->holders > 0 && param->exact_holders == 0 && param->copies.codec && !written(*param) &&
        param->available() && !param->shows_decoded())
      held.push_back(param);
  for (ShardedParam* param : held) param->forget_values();
  if (!held.empty()) with_slices([&] { source_->gather(held, {}, Values::kUsed); });
}

void ParamGatherer::release_all() {
  for (const ShardedParamPtr& param : params_)
    if (param->holders == 0) drop(*param);
}

void ParamGatherer::mark_persistent() {
  int64_t total = 0;
  std::vector<ShardedParam*> stay;
  for (const ShardedParamPtr& param : params_) {
    const bool small = param->numel() < options_.persistence_numel;
    if (!small || param->persistent || total + param->numel() > options_.model_persistence_numel) continue;
    total += param->numel();
    param->persistent = true;
    stay.push_back(param.get());
  }
  hold(stay);
}

void ParamGatherer::publish(bool renew) {
  if (copies_) {
    copies_->follow_slices(renew);
    if (storage::done_on_return(params_.front()->device())) copies_->finish();  // others may read them after this
  }
  source_->after_write();
  ++publications_;
}

// A second copy that has not followed yet is made by all ranks together.
void ParamGatherer::need_copies() {
  if (!copies_) return;
  if (!copies_->stale()) return copies_->finish();
  copies_->start();
  copies_->finish();
  source_->after_write();
  ++publications_;
  refresh_unwritten();
}

// Available parameters into which the user has written nothing that the slices lack.
void ParamGatherer::refresh_unwritten() {
  std::vector<ShardedParam*> stale;
  for (const ShardedParamPtr& param : params_)
    if (param->available() && param->buffer().defined() && !param->user_wrote()) stale.push_back(param.get());
  source_->refresh(stale, Values::kUsed);
  for (ShardedParam* param : stale) param->know_values();
}

void ParamGatherer::refresh_persistent(Values values) {
  forget_saved_again();
  std::vector<ShardedParam*> stale;
  for (const ShardedParamPtr& param : params_) {
    if (!param->available()) continue;
    if (param->holders == 0 || !param->buffer().defined()) {
      live_ -= param->numel();
      param->release();  // the slices have what was written
    } else {
      stale.push_back(param.get());
    }
  }
  if (values == Values::kUsed && !stale.empty()) settle_copies();
  with_slices([&] { source_->refresh(stale, values); });
  for (ShardedParam* param : stale) param->know_values();
  for (const ShardedParamPtr& param : params_) param->know_slice();
}

// See ShardSource::meet_writes.
void ParamGatherer::meet_writes() {
  ++forwards_;
  std::vector<ShardedParam*> written;
  for (const ShardedParamPtr& param : params_)
    if (param->slice_written()) written.push_back(param.get());
  if (copies_) copies_->recode(written);
  need_copies();
  if (options_.keeps_writes && source_->meet_writes(!written.empty(), forwards_)) refresh_unwritten();
}

void ParamGatherer::before_slice_write() {
  with_slices([&] { source_->before_slice_write(); });
}

void ParamGatherer::drain() {
  with_slices([&] { source_->drain(); });
}

// ---- uses ---------------------------------------------------------------------------------------------------------

bool ParamGatherer::covers(int32_t unit) const {
  if (source_->has_all() && (in_forward_ || !kept_.empty())) return true;
  const int32_t block = units_.at(unit).block;
  return block >= 0 && any_of(running_, [&](const UsePtr& use) { return use->unit == block; });
}

void ParamGatherer::enter(int32_t index, const std::vector<at::Tensor>& inputs) {
  at::NoGradGuard no_grad;
  auto use = std::make_shared<Use>();
  use->unit = index;
  for (ShardedParam* param : units_.at(index).params)
    if (!left_out_.count(param)) use->params.push_back(param);
  use->entered_at = events_;
  // A recomputation in backward that torch ended early, by an exception of its own, never left its modules: backward
  // has gone on since, which it does not do inside a call.
  while (!in_forward_ && !running_.empty() && running_.back()->entered_at != events_) {
    let_go(running_.back()->params, false);
    running_.pop_back();
  }
  note(index);
  running_.push_back(use);
  hold(use->params);
  const std::weak_ptr<Use> weak = use;
  const std::weak_ptr<bool> alive = alive_;
  for (const at::Tensor& input : inputs) {
    if (!input.requires_grad() || input.is_leaf()) continue;
    ++use->inputs;
    input.register_hook([this, weak, alive](const at::Tensor& grad) -> at::Tensor {
      const auto living = alive.lock();
      const auto done = weak.lock();
      if (living && *living && done && done->held && --done->open_inputs == 0) end_backward_use(done);
      return grad;
    });
  }
}

void ParamGatherer::leave(int32_t index, const std::vector<at::Tensor>& outputs) {
  // A call inside this one may have raised, and been caught: it never left.
  UsePtr use;
  while (!running_.empty()) {
    use = running_.back();
    running_.pop_back();
    if (use->unit == index) break;
    let_go(use->params, false);
    use.reset();
  }
  if (!use) return;
  hook_outputs(use, outputs);
  let_go(use->params, wanted_soon(index));
}

void ParamGatherer::hook_outputs(const UsePtr& use, const std::vector<at::Tensor>& outputs) {
  const std::weak_ptr<bool> alive = alive_;
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) continue;
    output.register_hook([this, use, alive](const at::Tensor& grad) -> at::Tensor {
      const auto living = alive.lock();
      if (living && *living) start_backward_use(use);
      return grad;
    });
  }
}

void ParamGatherer::start_backward_use(const UsePtr& use) {
  const StepClock::Guest here(*options_.clock);  // autograd may run it in a thread of its own
  if (use->held) return;
  ++events_;
  use->held = true;
  use->open_inputs = use->inputs;
  if (use->unit >= 0) note(use->unit);
  backward_.push_back(use);
  hold(use->params);
  if (c10::GradMode::is_enabled()) {  // create_graph: what runs now saves the parameters for another backward
    hold(use->params);
    append(saved_again_, use->params);
    creates_graph_ = true;
  }
  if (use->inputs > 0) return;
  // No input will tell when its part is through, but at the latest that is when the backward ends which this hook runs
  // in: the one of a segment that is recomputed, for a module inside re-entrant checkpointing.
  const std::weak_ptr<bool> alive = alive_;
  torch::autograd::Engine::get_default_engine().queue_callback([this, use, alive] {
    const auto living = alive.lock();
    if (living && *living && use->held) end_backward_use(use);
  });
}

void ParamGatherer::end_backward_use(const UsePtr& use) {
  ++events_;
  use->held = false;
  backward_.erase(std::remove(backward_.begin(), backward_.end(), use), backward_.end());
  let_go(use->params, wanted_soon(use->unit));
}

void ParamGatherer::begin_forward() {
  reset_uses();
  with_slices([&] { meet_writes(); });
  in_forward_ = true;
  whole_ = std::make_shared<Use>();
  whole_->unit = -1;
  if (source_->has_all()) hold_all();
  recorded_before_ = recording_.size();
  if (offloaded_) source_->expect(wanted_next());
}

// Values that cost nothing are here from the begin of a forward to the end of its backward.
void ParamGatherer::hold_all() {
  for (const ShardedParamPtr& param : params_)
    if (!param->persistent && !left_out_.count(param.get())) whole_->params.push_back(param.get());
  hold(whole_->params);
}

void ParamGatherer::end_forward(const std::vector<at::Tensor>& outputs) {
  in_forward_ = false;
  source_->end_forward();
  creates_graph_ = false;  // a gradient inside forward: the next backward is the one that uses its graph
  for (const UsePtr& use : running_) let_go(use->params, false);
  running_.clear();
  if (whole_ && !whole_->params.empty()) {
    hook_outputs(whole_, outputs);
    // A backward follows, which begins with what was used last.
    if (!outputs.empty() && live_ <= options_.max_live_numel) {
      kept_ = whole_->params;
    } else {
      let_go(whole_->params, false);
    }
  }
  whole_.reset();
  if (!outputs.empty()) return;
  forget_saved_again();
  source_->forget_ahead();
  release_all();
  // An evaluation says nothing about training. Where nobody trains it tells what to fetch ahead in the next one.
  if (offloaded_ && (trace_.empty() || evaluated_)) {
    trace_.assign(recording_.begin() + static_cast<std::ptrdiff_t>(recorded_before_), recording_.end());
    unseen_.clear();
    evaluated_ = true;
  }
  recording_.resize(recorded_before_);
  cursor_ = 0;
}

void ParamGatherer::abandon_forward() {
  reset_uses();
  in_forward_ = false;
  source_->end_forward();
  if (backward_.empty()) release_all();
}

void ParamGatherer::let_go_kept() { let_go(std::exchange(kept_, {}), false); }

void ParamGatherer::forget_saved_again() {
  let_go(saved_again_, false);
  saved_again_.clear();
}

void ParamGatherer::end_backward() {
  if (!in_forward_) {
    // A recomputation that torch ended early, by an exception of its own, never left the modules it was in.
    for (const UsePtr& use : running_) let_go(use->params, false);
    running_.clear();
  }
  creates_graph_ = false;
  for (const UsePtr& use : std::vector<UsePtr>(backward_)) {
    use->held = false;
    let_go(use->params, false);
  }
  backward_.clear();
  let_go_kept();
  source_->forget_ahead();
  release_all();
  if (!recording_.empty()) {
    learn_trace();
    evaluated_ = false;
  }
  recording_.clear();
  cursor_ = 0;
}

void ParamGatherer::reset_uses() {
  for (const UsePtr& use : running_) let_go(use->params, false);
  running_.clear();
  if (in_forward_ && whole_) let_go(whole_->params, false);
  whole_.reset();
  let_go_kept();
}

bool ParamGatherer::touch(ShardedParam& param) {
  // A released tensor that was gathered by another name of the same parameter needs nothing.
  if (param.available()) return true;
  const bool in_backward = !backward_.empty();
  if (!in_forward_ && running_.empty() && !in_backward) return false;
  const UsePtr use = !running_.empty() ? running_.back() : in_forward_ ? whole_ : backward_.back();
  use->params.push_back(&param);
  if (use == whole_) used_outside_.insert(&param);
  if (use->unit >= 0) {
    Unit& unit = units_[use->unit];
    if (!contains(unit.params, &param)) {
      unit.params.push_back(&param);
      unit.numel += param.numel();
      allow_pool(unit);
    }
  }
  hold({&param});
  return true;
}

}  // namespace ds::zero
