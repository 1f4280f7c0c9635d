#include "zero/states/state_access.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.h"
#include "zero/gradients/sparse_rows.h"

namespace ds::zero {

void StateAccess::assign_optimizer_grads(const std::vector<at::Tensor>& masters) {
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
    if (slot.scalar_type() == masters[i].scalar_type() && slot.device() == masters[i].device()) {
      grad = slot;
    } else {
      grad = at::empty_like(masters[i]);
      device_.copy(grad, slot, slot.scalar_type() == masters[i].scalar_type() ? 1.0f : scale);
    }
    if (store_.spec(pieces[i].param).form == GradForm::kSparseRows && space.in_place) grad = as_sparse(grad);
  }
}

void StateAccess::take_back_grads(const std::vector<at::Tensor>& masters) {
  for (const at::Tensor& master : masters) master.mutable_grad() = at::Tensor();
}

const Buffer* StateAccess::buffer(ParamSpace& space, StateKind kept, int slot) {
  if (kept == StateKind::kGrad) return &space.grad;
  strategy_.settle();
  if (kept == StateKind::kMaster) return &space.master;
  const int own = static_cast<int>(stepper_.slot_names().size());
  if (slot < own || slot >= static_cast<int>(slot_names().size())) return stepper_.slot(space, slot);
  return strategy_.state(space, static_cast<size_t>(slot - own));
}

std::vector<std::string> StateAccess::slot_names() const {
  std::vector<std::string> names = stepper_.slot_names();
  for (std::string& name : strategy_.state_names()) names.push_back(std::move(name));
  return names;
}

void StateAccess::hold_states() {
  strategy_.settle();
  std::vector<std::pair<const ParamSpace*, const Buffer*>> more;
  for (size_t number = 0; number < strategy_.state_names().size(); ++number)
    for (const ParamSpace& space : store_.spaces()) more.emplace_back(&space, strategy_.state(space, number));
  hold_.hold(more);
}

void StateAccess::restore_strategy(const Counters& counters) {
  at::NoGradGuard no_grad;
  stepper_.sums().restore(counters);
  stepper_.compressed().restore(counters);
  WriteScope scope(*this);
  if (strategy_.restore(counters)) stepper_.gather();
  scope.close();
}

std::vector<at::Tensor> StateAccess::pieces(StateKind kept, int slot, bool copies) {
  if (kept != StateKind::kGrad && !copies) hold_.wait();  // the caller may write to them
  std::vector<at::Tensor> result;
  if (kept == StateKind::kGrad) strategy_.forget();
  for (size_t number = 0; number < store_.pieces().size(); ++number) {
    const Piece& piece = store_.pieces()[number];
    const Buffer* from = copies ? nullptr : buffer(store_.spaces()[piece.space], kept, slot);
    if (copies) {
      result.push_back(piece_tensor(kept, slot, number));
    } else {
      result.push_back(from == nullptr ? at::Tensor() : store_.piece_view(piece, *from));
    }
  }
  return result;
}

at::Tensor StateAccess::piece_tensor(StateKind kept, int slot, size_t number) {
  const Piece& piece = store_.pieces().at(number);
  const Buffer* from = buffer(store_.spaces()[piece.space], kept, slot);
  if (from == nullptr) return {};
  const at::Tensor view = store_.piece_view(piece, *from);
  return view.is_meta() ? store_.piece_lease(piece, *from, storage::Access::kRead).second.clone() : view;
}

std::pair<storage::Lease, at::Tensor> StateAccess::piece(StateKind kept, int slot, size_t number,
                                                         storage::Access access) {
  if (access != storage::Access::kRead && kept != StateKind::kGrad) hold_.wait();
  const Piece& piece = store_.pieces().at(number);
  const Buffer* from = buffer(store_.spaces()[piece.space], kept, slot);
  if (from == nullptr) return {};
  return store_.piece_lease(piece, *from, access);
}

at::Tensor StateAccess::local_grad(size_t param) {
  at::NoGradGuard no_grad;
  if (!grads_.has_local(param)) return {};
  const ParamSpec& spec = store_.spec(param);
  const ParamSpace& space = store_.space_of(param);
  const at::ScalarType type = space.local.dtype == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor flat =
      at::zeros({store_.position(param).numel}, at::TensorOptions().device(store_.device()).dtype(type));
  const auto index = store_.position(param).index;
  for (size_t e = space.map.first[index]; e < space.map.first[index + 1]; ++e) {
    const plan::Extent& extent = space.map.extents[e];
    flat.narrow(0, extent.param_offset, extent.numel)
        .copy_(store_.on_device(space.local, {extent.full_offset, extent.full_offset + extent.numel}));
  }
  return flat.as_strided(spec.sizes(), spec.strides(), 0);
}

at::Tensor StateAccess::full(StateKind kept, int slot, size_t param) {
  at::NoGradGuard no_grad;
  ParamSpace& space = store_.space_of(param);
  if (kept == StateKind::kGrad && !grads_.used(param)) return {};
  const Buffer* found = buffer(space, kept, slot);
  if (found == nullptr) return {};
  const Buffer& from = *found;
  const at::ScalarType type = from.dtype == at::kDouble ? at::kDouble : at::kFloat;
  if (space.in_place && from.on_device())
    return store_.view(param, from).to(type, /*non_blocking=*/false, /*copy=*/true);
  const ParamSpec& spec = store_.spec(param);
  const at::Tensor flat =
      at::zeros({store_.position(param).numel}, at::TensorOptions().device(store_.device()).dtype(type));
  for (const plan::Extent& extent : own_extents(param)) {
    const int64_t begin = space.offset_in(from, extent);
    flat.narrow(0, extent.param_offset, extent.numel)
        .copy_(store_.lease(from, {begin, begin + extent.numel}, storage::Access::kRead).data());
  }
  // Summed as integers, since all but one rank have zero bits: every value arrives as it is, minus zero included.
  const at::Tensor bits = flat.view(type == at::kDouble ? at::kLong : at::kInt);
  if (!space.in_place) space.ranks().shard->all_reduce(bits, comm::ReduceOp::kSum, spec.name)->wait();
  return flat.as_strided(spec.sizes(), spec.strides(), 0);
}

std::vector<plan::Extent> StateAccess::own_extents(size_t param) const {
  const ParamSpace& space = store_.space_of(param);
  const auto index = store_.position(param).index;
  std::vector<plan::Extent> own;
  for (size_t e = space.map.first[index]; e < space.map.first[index + 1]; ++e)
    if (space.map.extents[e].rank == space.rank()) own.push_back(space.map.extents[e]);
  return own;
}

void StateAccess::set_full(StateKind kept, int slot, size_t param, const at::Tensor& value) {
  at::NoGradGuard no_grad;
  const ParamSpec& spec = store_.spec(param);
  if (value.numel() != store_.position(param).numel)
    fail(ErrorKind::kValue, "parameter '", spec.name, "' has ", store_.position(param).numel, " elements, the value ",
         value.numel());
  const at::Tensor flat = device_.flattened(value.to(store_.device()), spec.sizes(), spec.strides());
  ParamSpace& space = store_.space_of(param);
  hold_.wait();
  if (kept == StateKind::kGrad) strategy_.forget();
  if (kept == StateKind::kGrad) grads_.set_used(param);
  std::optional<WriteScope> scope;
  if (kept == StateKind::kMaster) {
    writes_.bring_home(param);
    scope.emplace(*this);
  }
  const Buffer* found = buffer(space, kept, slot);
  if (found == nullptr)
    fail(ErrorKind::kValue, "parameter '", spec.name, "' has no optimizer state '", slot_names()[slot], "'");
  const Buffer& to = *found;
  const auto index = store_.position(param).index;
  const auto set = [&](const Buffer& buffer, const plan::Extent& extent) {
    const int64_t begin = space.offset_in(buffer, extent);
    store_.lease(buffer, {begin, begin + extent.numel}, storage::Access::kUpdate)
        .data()
        .copy_(flat.narrow(0, extent.param_offset, extent.numel));
  };
  for (size_t e = space.map.first[index]; e < space.map.first[index + 1]; ++e) {
    const plan::Extent& extent = space.map.extents[e];
    const bool own = extent.rank == space.rank();
    if (kept == StateKind::kMaster && (space.lp.full || own)) set(space.lp, extent);
  }
  for (const plan::Extent& extent : own_extents(param)) set(to, extent);
  if (scope) scope->close();
}

// visit(piece, tensor) of what there is of the parameter.
template <typename Visit>
void StateAccess::visit_own(const std::vector<at::Tensor>& own, size_t param, const Visit& visit) const {
  const std::vector<Piece>& pieces = store_.pieces();
  if (own.size() != pieces.size())
    fail(ErrorKind::kValue, own.size(), " tensors for the ", pieces.size(), " pieces that this rank owns");
  const auto before = [](const Piece& piece, int64_t wanted) { return piece.param < wanted; };
  auto piece = std::lower_bound(pieces.begin(), pieces.end(), static_cast<int64_t>(param), before);
  for (; piece != pieces.end() && piece->param == static_cast<int64_t>(param); ++piece) {
    const at::Tensor& tensor = own[piece - pieces.begin()];
    if (tensor.defined()) visit(*piece, tensor);
  }
}

at::Tensor StateAccess::full_of(const std::vector<at::Tensor>& own, size_t param) {
  at::NoGradGuard no_grad;
  const ParamSpec& spec = store_.spec(param);
  const ParamSpace& space = store_.space_of(param);
  if (space.in_place) {
    at::Tensor whole;
    visit_own(own, param, [&](const Piece&, const at::Tensor& tensor) { whole = tensor.detach().clone(); });
    return whole;
  }
  const int64_t numel = store_.position(param).numel;
  const at::ScalarType type = space.key.dtype == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor flat = at::zeros({numel + 1}, at::TensorOptions().device(store_.device()).dtype(type));
  const at::Tensor bits = flat.view(type == at::kDouble ? at::kLong : at::kInt);  // summed as in full()
  visit_own(own, param, [&](const Piece& piece, const at::Tensor& tensor) {
    flat.narrow(0, piece.param_offset, piece.numel).copy_(tensor.reshape({-1}));
    bits.narrow(0, numel, 1).fill_(1);
  });
  space.ranks().shard->all_reduce(bits, comm::ReduceOp::kSum, spec.name)->wait();
  if (bits[numel].item<int64_t>() == 0) return {};
  return flat.as_strided(spec.sizes(), spec.strides(), 0);
}

void StateAccess::set_full_of(const std::vector<at::Tensor>& own, size_t param, const at::Tensor& value) {
  at::NoGradGuard no_grad;
  const ParamSpec& spec = store_.spec(param);
  hold_.wait();
  const at::Tensor flat = device_.flattened(value.to(store_.device()), spec.sizes(), spec.strides());
  visit_own(own, param, [&](const Piece& piece, const at::Tensor& tensor) {
    if (tensor.sizes() == value.sizes()) {
      tensor.copy_(value);
    } else {
      tensor.copy_(flat.narrow(0, piece.param_offset, piece.numel).view(tensor.sizes()));
    }
  });
}

at::Tensor StateAccess::padded_slices(const std::vector<at::Tensor>& own, const std::vector<size_t>& params) const {
  at::NoGradGuard no_grad;
  int64_t numel = 0, begin = 0;
  for (size_t param : params) numel += store_.spec(param).sharded->slice_numel();
  const at::Tensor flat = at::zeros({numel}, at::kFloat);
  for (size_t param : params) {
    const ShardedParam& sharded = *store_.spec(param).sharded;
    visit_own(own, param, [&](const Piece& piece, const at::Tensor& tensor) {
      const int64_t at = begin + piece.param_offset - sharded.own_begin();
      flat.narrow(0, at, piece.numel).copy_(tensor.detach().reshape({-1}));
    });
    begin += sharded.slice_numel();
  }
  return flat;
}

void StateAccess::refresh_master() {
  strategy_.settle();
  hold_.wait();
  writes_.bring_home();
  stepper_.refresh_master();
  writes_.know();
}

void StateAccess::publish() {
  writes_.bring_home();
  stepper_.publish();
  writes_.know();
}

void StateAccess::finish_step() {
  if (gatherer_) gatherer_->after_change(/*renew=*/true);
}

WriteScope::~WriteScope() {
  try {
    close();
  } catch (const std::exception&) {  // the caller that opened the scope gets the first error
  }
}

void WriteScope::close() {
  if (StateAccess* states = std::exchange(states_, nullptr)) states->end_write();
}

void StateAccess::begin_write() {
  strategy_.settle();
  hold_.wait();
  if (writing_ > 0 || !gatherer_) {
    ++writing_;
    return;
  }
  gatherer_->before_change();
  ++writing_;
  writes_.adopt();  // the end of a write gathers what is held anew
}

void StateAccess::end_write() {
  if (--writing_ == 0 && gatherer_) gatherer_->after_change(/*renew=*/false);
}

}  // namespace ds::zero
