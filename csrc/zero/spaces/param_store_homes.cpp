// Whole parameters and their views of the flat buffer.
//
// [Note: a storage for each parameter]
// A parameter is a view of the flat buffer with a storage of its own, which begins and ends where the parameter does.
// torch.save and the like write whole storages: with the buffer's they would write all parameters instead of one. The
// count of that storage also tells whether other tensors refer to it: a caller that assigns another tensor to the data
// and keeps the old one, to assign it again later, keeps its values.
#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "base/error.h"
#include "zero/spaces/param_store.h"

namespace ds::zero {

namespace {

char* address(const at::Tensor& flat, int64_t offset) {
  return static_cast<char*>(flat.data_ptr()) + offset * static_cast<int64_t>(flat.element_size());
}

// Nothing while the buffer is away.
c10::DataPtr part_of(const at::Tensor& flat, int64_t offset) {
  if (flat.storage().nbytes() == 0) return {nullptr, flat.device()};
  auto* kept = new c10::Storage(flat.storage());
  return {address(flat, offset), kept, [](void* storage) { delete static_cast<c10::Storage*>(storage); },
          flat.device()};
}

at::Tensor view_of_own(const at::Tensor& flat, int64_t offset, int64_t numel, at::IntArrayRef sizes,
                       at::IntArrayRef strides) {
  const auto bytes = static_cast<size_t>(numel) * flat.element_size();
  const c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                                   part_of(flat, offset),
                                                                   flat.storage().unsafeGetStorageImpl()->allocator(),
                                                                   /*resizable=*/false));
  const at::Tensor view = at::empty({0}, flat.options());  // not set_(), which wants to resize storages of meta tensors
  view.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return view;
}

}  // namespace

void ParamStore::make_home(size_t param, at::IntArrayRef sizes, at::IntArrayRef strides) {
  const ParamSpace& space = space_of(param);
  const auto index = positions_[param].index;
  specs_[param].home = view_of_own(space.lp.data, space.map.offsets[index], space.map.numels[index], sizes, strides);
}

plan::Range ParamStore::block_of(size_t param, const Buffer& buffer) const {
  const ParamSpace& space = space_of(param);
  return space.block_in(buffer, space.map.buckets[space.map.bucket_of[positions_[param].index]]);
}

at::Tensor ParamStore::view(size_t param, const Buffer& full) const {
  const ParamSpec& spec = specs_[param];
  const plan::Range block = block_of(param, full);
  const at::Tensor flat = on_device(full, block);
  const int64_t offset = space_of(param).map.offsets[positions_[param].index] - block.begin;
  return flat.as_strided(spec.sizes(), spec.strides(), flat.storage_offset() + offset);
}

at::Tensor ParamStore::own_grad_view(size_t param) const {
  const ParamSpace& space = space_of(param);
  const ParamSpec& spec = specs_[param];
  const auto index = positions_[param].index;
  const plan::Range block = block_of(param, space.grad);
  return view_of_own(on_device(space.grad, block), space.map.offsets[index] - block.begin, space.map.numels[index],
                     spec.sizes(), spec.strides());
}

void ParamStore::follow_move(const at::Tensor& own_grad_view, size_t param) const {
  const ParamSpace& space = space_of(param);
  const plan::Range block = block_of(param, space.grad);
  empty_view(own_grad_view);
  if (storage_->resting(space.grad.plane, block) != storage::Medium::kDevice ||
      !storage_->has_memory(space.grad.plane, block))
    return;
  const at::Tensor grads = on_device(space.grad, block);
  c10::StorageImpl* storage = own_grad_view.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(part_of(grads, space.map.offsets[positions_[param].index] - block.begin));
  storage->set_nbytes(static_cast<size_t>(positions_[param].numel) * grads.element_size());
}

void ParamStore::empty_view(const at::Tensor& own_grad_view) const {
  c10::StorageImpl* storage = own_grad_view.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap({nullptr, device_});
  storage->set_nbytes(size_t{0});
}

void ParamStore::leave_with_values(const at::Tensor& own) const {
  const c10::DeviceGuard current(device_);
  c10::StorageImpl* left = own.storage().unsafeGetStorageImpl();
  const auto bytes = static_cast<int64_t>(left->nbytes());
  if (bytes == 0 || device_.is_meta()) return;  // a planned gradient has no values
  const at::Tensor copy = at::empty({bytes}, at::TensorOptions().device(device_).dtype(at::kByte));
  copy.copy_(at::empty({0}, copy.options()).set_(own.storage(), 0, {bytes}, {1}));
  auto* kept = new c10::Storage(copy.storage());
  left->set_data_ptr_noswap(
      {copy.data_ptr(), kept, [](void* storage) { delete static_cast<c10::Storage*>(storage); }, copy.device()});
}

void ParamStore::follow_moves() {
  for (size_t param = 0; param < specs_.size(); ++param) {
    const at::Tensor& home = specs_[param].home;
    if (!home.defined()) continue;
    const ParamSpace& space = space_of(param);
    const bool here = space.lp.data.storage().nbytes() > 0;
    c10::StorageImpl* storage = home.storage().unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(part_of(space.lp.data, space.map.offsets[positions_[param].index]));
    storage->set_nbytes(here ? static_cast<size_t>(positions_[param].numel) * home.element_size() : size_t{0});
  }
}

std::vector<at::Tensor> ParamStore::flat_params() const {
  std::vector<at::Tensor> found;
  for (const ParamSpace& space : spaces_)
    if (space.lp.full) found.push_back(space.lp.data);
  return found;
}

bool ParamStore::at_home(size_t param) const {
  const ParamSpec& spec = specs_[param];
  if (!spec.home.defined()) return true;
  const c10::TensorImpl* now = spec.tensor.unsafeGetTensorImpl();
  const c10::TensorImpl* home = spec.home.unsafeGetTensorImpl();
  return now->has_storage() && now->storage().unsafeGetStorageImpl() == home->storage().unsafeGetStorageImpl() &&
         home_is_here(param) && now->storage_offset() == 0 && now->dtype() == home->dtype() &&
         now->sizes() == home->sizes() && now->strides() == home->strides();
}

// Its memory is the buffer's: share_memory_() puts other memory there.
bool ParamStore::home_is_here(size_t param) const {
  const ParamSpace& space = space_of(param);
  const int64_t offset = space.map.offsets[positions_[param].index];
  const bool away = space.lp.data.storage().nbytes() == 0;
  return away || positions_[param].numel == 0 || specs_[param].home.data_ptr() == address(space.lp.data, offset);
}

void ParamStore::bring_home(size_t param, const at::Tensor& value) {
  at::NoGradGuard no_grad;
  ParamSpec& spec = specs_[param];
  if (value.layout() != at::kStrided || value.is_meta() || value.sizes() != spec.home.sizes() ||
      value.scalar_type() != spec.home.scalar_type())
    fail(ErrorKind::kRuntime, "parameter '", spec.name, "' was ", c10::toString(spec.home.scalar_type()), " ",
         c10::str(spec.home.sizes()), " when the engine was made and is ", c10::toString(value.scalar_type()), " ",
         c10::str(value.sizes()), value.is_meta() ? " without values (device meta)" : "",
         " now (param.data = ..., module.to(dtype), or load_state_dict(assign=True) after deepspeed.initialize): give "
         "it "
         "a tensor of its own shape and dtype, or call deepspeed.initialize with the changed model");
  const c10::DeviceGuard current(device_);
  const at::Tensor from = value.detach();
  if (spec.home.storage().use_count() > 1) {
    // Other tensors refer to the old view: they keep its values, in memory of their own.
    if (home_is_here(param) && spec.home.numel() > 0) leave_with_values(spec.home);
    make_home(param, spec.home.sizes().vec(), spec.home.strides().vec());
  }
  spec.home.copy_(from);
  spec.tensor.set_data(spec.home);
}

}  // namespace ds::zero
