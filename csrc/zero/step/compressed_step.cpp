#include "zero/step/compressed_step.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/ranges.h"

namespace ds::zero {

namespace {

constexpr const char *kLrSum = "lr_sum", *kFreezeStep = "freeze_step", *kDecided = "decided_freeze_step";
constexpr size_t kVarianceSlot = 1;  // of all rules that compress
constexpr double kSteady = 0.04, kNever = 1e18;

// The position of a hyperparameter, or -1.
int64_t position_of(const optim::Rule& rule, const char* name) {
  for (size_t i = 0; i < rule.hyper.size(); ++i)
    if (rule.hyper[i].name == name) return static_cast<int64_t>(i);
  return -1;
}

void refuse_ranks(const ParamStore& store, const std::string& rule) {
  for (const SpaceSet& set : store.sets()) {
    if (set.params.empty() ||
        (same_ranks(set.ranks.replicas, store.everyone().replicas) && set.ranks.shard->size() == 1))
      continue;
    fail(ErrorKind::kValue, "the optimizer '", rule,
         "' exchanges signs among all data-parallel ranks, but parameter \"", store.spec(set.params.front()).name,
         "\" is on some of them only (an expert) or sharded. Use another optimizer for this model");
  }
}

}  // namespace

void CompressedStep::set_rules(const std::vector<const optim::Rule*>& rules, at::Tensor steps) {
  rules_.clear();
  for (const optim::Rule* rule : rules)
    if (rule->compresses()) rules_ = rules;
  if (rules_.empty()) return;
  const auto plain = std::find_if(rules.begin(), rules.end(), [](const auto* rule) { return !rule->compresses(); });
  if (plain != rules.end())
    fail(
        ErrorKind::kValue, "a parameter group is updated by '", (*plain)->name,
        "' and another one by an optimizer that exchanges signs. They need different gradients: use one of the two for "
        "all groups");
  if (store_.policy().shards_states())
    fail(ErrorKind::kValue, "the optimizer '", rules_.front()->name,
         "' needs whole parameters on every rank: set \"zero_optimization.stage\" to 0. To compress what ZeRO sends, "
         "use "
         "another optimizer with zero_quantized_gradients and zero_quantized_weights (ZeRO++)");
  refuse_ranks(store_, rules_.front()->name);
  steps_ = std::move(steps);
  lr_sums_.assign(rules_.size(), 0.0);
  kept_ = std::vector<Kept>(store_.spaces().size());
  restore({});
}

// ---- phases -------------------------------------------------------------------------------------------------------

// The number of the next update: all ranks have the same counts.
int64_t CompressedStep::update() const {
  const float* const counts = steps_.data_ptr<float>();
  const float most = steps_.numel() == 0 ? 0.0f : *std::max_element(counts, counts + steps_.numel());
  return static_cast<int64_t>(most) + 1;
}

GroupValues CompressedStep::known(GroupValues hyper) const {
  for (size_t group = 0; group < std::min(hyper.size(), rules_.size()); ++group) {
    const int64_t freeze = position_of(*rules_[group], kFreezeStep);
    if (freeze >= 0 && hyper[group][freeze] < 0) hyper[group][freeze] = decided_ > 0 ? decided_ : kNever;
  }
  return hyper;
}

void CompressedStep::expect(GroupValues hyper) {
  given_ = std::move(hyper);
  hyper_ = known(given_);
}

// See [Note: a freeze that decides itself].
void CompressedStep::look_at_variance() {
  const int64_t freeze = position_of(*rules_.front(), kFreezeStep);
  if (freeze < 0 || given_.front()[freeze] >= 0 || decided_ > 0 || device_.device().is_meta()) return;
  at::Tensor sum = at::zeros({}, at::TensorOptions().device(device_.device()).dtype(at::kDouble));
  for (const ParamSpace& space : store_.spaces()) sum = sum + space.slots.at(kVarianceSlot).data.sum(at::kDouble);
  variances_.push_back(sum.item<double>());
  const double beta2 = optim::Values(rules_.front()->hyper, given_.front().data())["beta2"];
  const auto window = static_cast<size_t>(std::ceil(1.0 / (1.0 - beta2) - 1e-9));
  if (variances_.size() <= window) return;
  const double before = variances_.front(), now = variances_.back();
  variances_.pop_front();
  if (!(std::abs(now - before) < kSteady * now)) return;
  decided_ = static_cast<double>(update());
  hyper_ = known(given_);
}

const optim::Phase* CompressedStep::phase(size_t group) const {
  return active() && group < hyper_.size() ? rules_[group]->phase(hyper_[group], update()) : nullptr;
}

bool CompressedStep::local() const {
  const optim::Phase* const first = phase(0);
  return first != nullptr && first->local;
}

GroupValues CompressedStep::begin(const GroupValues& hyper, bool local, const std::function<bool(size_t param)>& used) {
  expect(hyper);
  if (!active()) return hyper;
  phases_.clear();
  for (size_t group = 0; group < rules_.size(); ++group) phases_.push_back(phase(group));
  for (const optim::Phase* one : phases_)
    if (one->local != local || one->period != phases_.front()->period)
      fail(ErrorKind::kRuntime, "the gradients of this step ", local ? "are those of each rank" : "are a mean",
           ", and update ", update(), " of '", rules_.front()->name,
           "' needs others: its state was written, or a hyperparameter changed, after the backward. Do that before it");
  for (size_t param = 0; param < store_.size(); ++param) {
    const bool stale = phases_[store_.spec(param).group]->beside && steps_.data_ptr<float>()[param] > 0 && !used(param);
    if (stale)
      fail(ErrorKind::kRuntime, "local steps of '", rules_.front()->name,
           "' need a gradient of each parameter that has been updated before, and parameter \"",
           store_.spec(param).name,
           "\" has none on any rank in this step. Use OneBitAdam for a model that leaves parameters out");
  }
  const bool anew = phases_.front()->period != period_;
  for (size_t number = 0; number < kept_.size(); ++number) {
    const ParamSpace& space = store_.spaces()[number];
    Kept& kept = kept_[number];
    if (anew && kept.errors.exists()) kept.errors.data.zero_();
    if (anew && kept.owned.defined()) kept.owned.zero_();
    if (phases_[space.key.param_group]->beside && (anew || kept.beside.empty())) need_beside(space, kept);
  }
  if (anew) fill(lr_sums_, 0.0);
  period_ = phases_.front()->period;
  GroupValues values = hyper_;
  for (size_t group = 0; group < rules_.size(); ++group) {
    const int64_t sum = position_of(*rules_[group], kLrSum);
    if (sum < 0 || !phases_[group]->beside) continue;
    const optim::Values own(rules_[group]->hyper, hyper[group].data());
    const double correct = own["bias_correction"] != 0 ? 1.0 - std::pow(own["beta1"], update()) : 1.0;
    values[group][sum] = lr_sums_[group] += own["lr"] / correct;
  }
  return values;
}

void CompressedStep::finish() {
  if (!active()) return;
  apart_ = phases_.front()->apart;
  if (!apart_) fill(lr_sums_, 0.0);
  look_at_variance();
}

// ---- what is kept -------------------------------------------------------------------------------------------------

void CompressedStep::need_errors(const ParamSpace& space, Kept& kept) const {
  if (kept.errors.exists()) return;
  kept.errors = store_.make_buffer(space, "errors of exchanges", at::kFloat, space.in_place);
  int64_t room = 0;
  for (int64_t numel : space.map.numels) {
    kept.owned_begins.push_back(room);
    room += comm::slice_room(numel, space.ranks().replicas->size());
  }
  kept.owned = at::zeros({room}, kept.errors.data.options());
}

void CompressedStep::need_beside(const ParamSpace& space, Kept& kept) const {
  const std::vector<optim::Beside>& wanted = rules_[space.key.param_group]->beside;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (kept.beside.size() <= i)
      kept.beside.push_back(store_.make_buffer(space, wanted[i].name.c_str(), at::kFloat, space.in_place));
    if (wanted[i].of_weights) {
      device_.copy(kept.beside[i].data, space.master.data, 1.0f);
    } else {
      kept.beside[i].data.zero_();
    }
  }
}

const std::vector<Buffer>& CompressedStep::beside(const ParamSpace& space) const {
  static const std::vector<Buffer> none;
  if (phases_.empty() || !phases_[space.key.param_group]->beside) return none;
  return kept_[number_of(space)].beside;
}

void CompressedStep::restore(const NamedNumbers& numbers) {
  period_ = -1;
  apart_ = false;
  variances_.clear();
  const auto found = numbers.find(kDecided);
  decided_ = found != numbers.end() && !found->second.empty() ? found->second.front() : 0;
  hyper_ = known(given_);
}

NamedNumbers CompressedStep::counters() const {
  if (decided_ == 0) return {};
  return {{kDecided, {decided_}}};
}

std::vector<std::string> CompressedStep::zero_variances() const {
  at::NoGradGuard no_grad;
  std::vector<std::string> names;
  for (size_t param = 0; param < store_.size() && !device_.device().is_meta(); ++param) {
    const ParamSpace& space = store_.space_of(param);
    const auto masked = masks_.find(param);
    if (store_.position(param).numel == 0 || space.slots.size() <= kVarianceSlot) continue;
    if (masked != masks_.end() && masked->second.defined()) continue;
    const at::Tensor variance = store_.view(param, space.slots[kVarianceSlot]);
    const at::Tensor rows = variance.dim() > 1 ? variance.flatten(1).amax(1) : variance.max();
    if (rows.min().item<double>() == 0) names.push_back(store_.spec(param).name);
  }
  return names;
}

void CompressedStep::show_common(bool) {
  at::NoGradGuard no_grad;
  for (size_t number = 0; apart_ && number < kept_.size(); ++number) {
    const ParamSpace& space = store_.spaces()[number];
    const std::vector<optim::Beside>& names = rules_[space.key.param_group]->beside;
    for (size_t i = 0; i < names.size(); ++i) {
      if (!names[i].of_weights) continue;
      const at::Tensor& weights = kept_[number].beside[i].data;
      const at::Tensor own = space.master.data.clone();
      device_.copy(space.master.data, weights, 1.0f);
      device_.copy(weights, own, 1.0f);
    }
  }
}

std::pair<at::Tensor, at::Tensor> CompressedStep::errors(size_t param) const {
  const ParamPosition& position = store_.position(param);
  if (!active() || !kept_[position.space].errors.exists()) return {};
  const ParamSpace& space = store_.spaces()[position.space];
  const Kept& kept = kept_[position.space];
  return {store_.view(param, kept.errors),
          kept.owned.narrow(0, kept.owned_begins[position.index],
                            comm::slice_room(position.numel, space.ranks().replicas->size()))};
}

// ---- exchanges ----------------------------------------------------------------------------------------------------

at::Tensor CompressedStep::scratch(const plan::Bucket& bucket) const {
  return at::empty({bucket.shard_end - bucket.shard_begin},
                   at::TensorOptions().device(device_.device()).dtype(at::kFloat));
}

void CompressedStep::use_ranks(comm::CommunicatorPtr ranks) {
  const comm::Communicator& own = *store_.everyone().replicas;
  if (ranks->size() != own.size() || ranks->rank() != own.rank())
    fail(ErrorKind::kValue, "signs are to travel over '", ranks->name(), "', where this is rank ", ranks->rank(),
         " of ", ranks->size(), ", and gradients are those of rank ", own.rank(), " of ", own.size(),
         ": all ranks of the job have to be data-parallel, in the same order");
  own_ranks_ = std::move(ranks);
  for (Kept& kept : kept_) kept.exchanges.clear();
}

void CompressedStep::set_mask(size_t param, const at::Tensor& mask) {
  const ParamSpec& spec = store_.spec(param);
  if (mask.defined() && mask.sizes() != spec.sizes())
    fail(ErrorKind::kValue, "exp_avg_mask of parameter \"", spec.name, "\" has the shape ", mask.sizes(),
         ", and the parameter has ", spec.sizes(),
         ". Make it torch.ones_like(parameter), with zeros where gradients are ",
         "always zero, in a parameter group that has this parameter alone");
  masks_[param] = mask.defined() ? mask.detach().to(device_.device(), at::kFloat) : at::Tensor();
}

void CompressedStep::exchange(const ParamSpace& space, const plan::Bucket& bucket,
                              const std::function<bool(size_t param)>& used, const at::Tensor& row) {
  Kept& kept = kept_[number_of(space)];
  need_errors(space, kept);
  std::vector<int32_t> params;
  for (int32_t index = bucket.first_param; index <= bucket.last_param; ++index)
    if (used(static_cast<size_t>(space.params[index]))) params.push_back(index);
  if (params.empty()) return;
  const int64_t begin = space.map.full_begin(bucket);
  Kept::Made& made = kept.exchanges[begin];
  if (made.exchange == nullptr || made.params != params) {
    std::vector<comm::SignPart> parts;
    for (int32_t index : params)
      parts.push_back({space.map.offsets[index] - begin, space.map.numels[index], kept.owned_begins[index]});
    made.params = params;
    made.exchange = std::make_unique<comm::SignExchange>(
        own_ranks_ ? own_ranks_ : space.ranks().replicas, std::move(parts), rules_[space.key.param_group]->one_scale,
        [this](const comm::SignExchange::Call& call) {
          device_.run([&](const kernels::Launch& launch) { call(device_.codes(), launch); });
        });
  }
  made.exchange->mean(row, kept.errors.data.narrow(0, begin, row.numel()), kept.owned,
                      store_.spec(space.params[bucket.first_param]).name);
  for (int32_t index : params) {
    const auto found = masks_.find(static_cast<size_t>(space.params[index]));
    if (found == masks_.end() || !found->second.defined()) continue;
    const ParamSpec& spec = store_.spec(found->first);
    row.as_strided(spec.sizes(), spec.strides(), space.map.offsets[index] - begin).mul_(found->second);
  }
}

void CompressedStep::even_out(const optim::Rule& rule, const at::Tensor& sums) const {
  std::vector<double> numels;
  for (size_t param = 0; param < store_.size(); ++param)
    numels.push_back(static_cast<double>(std::max<int64_t>(1, store_.position(param).numel)));
  const at::Tensor sizes = sums.select(1, 0).div(at::tensor(numels, at::kDouble).to(sums.device())).sqrt();
  const at::Tensor some = sizes.gt(0);
  const at::Tensor mean = sizes.sum() / some.sum().clamp_min(1);
  const at::Tensor factors = at::where(some, mean / sizes, at::ones_like(sizes));
  sums.select(1, rule.scaling).copy_(factors);
  sums.select(1, 0).zero_();
}

}  // namespace ds::zero
