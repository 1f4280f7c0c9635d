// Buffers of gradients: their memory, the local ones beside the reduced ones, their type.
#include <ATen/Functions.h>

#include <utility>

#include "base/error.h"
#include "base/ranges.h"
#include "storage/meta_memory.h"
#include "zero/spaces/param_store.h"

namespace ds::zero {

Buffer ParamStore::make_grads(const ParamSpace& space, const char* name, at::ScalarType dtype, bool full,
                              const storage::Placement& placement) {
  if (!(placement == storage::Placement{})) return make_buffer(space, name, dtype, full, placement, grad_copies_);
  Buffer made;
  made.dtype = dtype;
  made.full = full;
  made.numel = full ? space.map.full_numel() : space.map.shard_numel;
  made.apart = true;
  made.plane = add_plane(space, name, made, placement, {{}, {}, {}, grad_copies_, /*apart=*/true});
  return made;
}

at::Tensor ParamStore::on_device(const Buffer& buffer, plan::Range range) const {
  if (range.numel() == 0) return at::empty({0}, at::TensorOptions().device(device_).dtype(buffer.dtype));
  if (buffer.data.defined()) return buffer.data.narrow(0, range.begin, range.numel());
  at::Tensor found = storage_->resident(buffer.plane, range);
  if (found.device() != device_)
    fail(ErrorKind::kRuntime,
         "gradients rest in the memory of the host: call engine.reload_states() before a backward");
  return found;
}

bool ParamStore::occupy(const Buffer& buffer, plan::Range range) const {
  return buffer.apart && storage_->occupy(buffer.plane, range);
}

at::Tensor ParamStore::grad_row_to_write(const ParamSpace& space, const plan::Bucket& bucket) const {
  const plan::Range row = space.row_in(space.grad, bucket);
  if (!space.grad.full) occupy(space.grad, row);  // else the row is a part of what has memory, and the rest is zero
  return on_device(space.grad, row);
}

bool ParamStore::frees_grads() const { return !storage::computes_on_host(device_); }

void ParamStore::free_grads() {
  if (!frees_grads()) return;
  for (const ParamSpace& space : spaces_)
    for (const Buffer& buffer : {space.grad, space.local})
      if (buffer.apart) storage_->discard(buffer.plane, {0, buffer.numel});
}

int64_t ParamStore::absent_grad_bytes() const {
  int64_t absent = 0;
  for (const ParamSpace& space : spaces_) {
    if (!space.grad.apart) continue;
    absent += space.grad.bytes();
    for (const at::Tensor& memory : storage_->memory(space.grad.plane)) absent -= static_cast<int64_t>(memory.nbytes());
  }
  return absent;
}

Buffer ParamStore::copied(const ParamSpace& space, const char* name, const Buffer& from, at::ScalarType dtype) {
  const Buffer made =
      make_grads(space, name, dtype, from.full, from.apart ? storage::Placement{} : space.key.placements.grad);
  for (const plan::Bucket& bucket : space.map.buckets) {
    if (from.apart) {
      const plan::Range block = space.block_in(from, bucket);
      if (!storage_->has_memory(from.plane, block)) continue;
      occupy(made, block);
      on_device(made, block).copy_(on_device(from, block));
      continue;
    }
    const plan::Range row = space.row_in(from, bucket);
    const storage::Lease source = lease(from, row, storage::Access::kRead);
    lease(made, row, storage::Access::kWrite).data().copy_(source.data());
  }
  return made;
}

at::ScalarType ParamStore::grad_type(const ParamSpace& space) const {
  return space.key.dtype == at::kDouble ? at::kDouble : options_.grad_dtype.value_or(space.key.dtype);
}

void ParamStore::set_grad_dtype(c10::optional<at::ScalarType> type) {
  at::NoGradGuard no_grad;
  options_.grad_dtype = type;
  limit_leaving();
  for (ParamSpace& space : spaces_) {
    if (space.grad.dtype == grad_type(space)) continue;
    Buffer grad = space.grad, local = space.local;
    space.grad = copied(space, "gradients", grad, grad_type(space));
    if (local.exists())
      space.local = local.is(grad) ? space.grad : copied(space, "local gradients", local, grad_type(space));
    if (!local.is(grad)) drop(local);
    drop(grad);
  }
}

void ParamStore::renew_grad_buffers() {
  for (ParamSpace& space : spaces_) {
    Buffer grad = space.grad, local = space.local;
    if (grad.apart) space.grad = copied(space, "gradients", grad, grad.dtype);
    if (local.exists())
      space.local = local.is(grad) ? space.grad : copied(space, "local gradients", local, local.dtype);
    if (!local.is(grad)) drop(local);
    if (grad.apart) drop(grad);
  }
}

void ParamStore::need_local() {
  at::NoGradGuard no_grad;
  for (ParamSpace& space : spaces_)
    if (!space.local.exists()) space.local = make_grads(space, "local gradients", space.grad.dtype, true);
}

void ParamStore::drop_local() {
  for (ParamSpace& space : spaces_)
    if (!space.in_place && keeps_grads_apart(space)) drop(space.local);
}

bool ParamStore::grad_buffer_aliased() const {
  return any_of(spaces_, [](const ParamSpace& space) { return space.grad_aliased(); });
}

void ParamStore::split_grad_buffer() {
  at::NoGradGuard no_grad;
  for (ParamSpace& space : spaces_) {
    if (!space.grad_aliased()) continue;
    const Buffer joined = space.grad;
    space.grad = make_grads(space, "gradients", joined.dtype, false);
    for (const plan::Bucket& bucket : space.map.buckets) {
      const plan::Range from = space.row_in(joined, bucket), to = space.row_in(space.grad, bucket);
      if (!storage_->has_memory(joined.plane, from)) continue;
      occupy(space.grad, to);
      on_device(space.grad, to).copy_(on_device(joined, from));
    }
  }
}

void ParamStore::alias_grad_buffer() {
  for (ParamSpace& space : spaces_) {
    if (space.in_place || keeps_grads_apart(space) || space.grad.is(space.local)) continue;
    drop(space.grad);
    space.grad = space.local;
  }
}

}  // namespace ds::zero
