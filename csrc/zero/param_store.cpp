#include "zero/param_store.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <map>
#include <unordered_set>

#include "base/error.h"

namespace ds::zero {

namespace {

// Strides of a parameter are kept (channels_last stays so) where its elements fill one block of memory.
std::vector<int64_t> kept_strides(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) return tensor.strides().vec();
  return at::empty(tensor.sizes(), tensor.options().device(at::kCPU)).strides().vec();
}

c10::Device common_device(const std::vector<ParamSpec>& specs) {
  if (specs.empty()) return c10::Device(at::kCPU);
  for (const ParamSpec& spec : specs)
    if (spec.tensor.device() != specs[0].tensor.device())
      fail(ErrorKind::kValue, "parameters lie on different devices: '", specs[0].name, "' on ",
           specs[0].tensor.device().str(), ", '", spec.name, "' on ", spec.tensor.device().str(),
           "; move the model to one device");
  return specs[0].tensor.device();
}

}  // namespace

ParamStore::ParamStore(std::vector<ParamSpec> specs, c10::optional<at::ScalarType> grad_dtype, int64_t align,
                       int64_t parts)
    : specs_(std::move(specs)), places_(specs_.size()), device_(common_device(specs_)) {
  at::NoGradGuard no_grad;
  std::unordered_set<const void*> seen;
  std::map<std::pair<int32_t, at::ScalarType>, size_t> index;
  for (size_t param = 0; param < specs_.size(); ++param) {
    const ParamSpec& spec = specs_[param];
    if (!seen.insert(spec.tensor.unsafeGetTensorImpl()).second)
      fail(ErrorKind::kValue, "parameter '", spec.name, "' appears twice in the optimizer's parameter groups");
    if (!spec.tensor.is_leaf())
      fail(ErrorKind::kValue, "parameter '", spec.name, "' is not a leaf tensor and cannot be optimised");
    if (!at::isFloatingType(spec.tensor.scalar_type()))
      fail(ErrorKind::kType, "parameter '", spec.name, "' has dtype ", c10::toString(spec.tensor.scalar_type()),
           "; only floating point parameters can be optimised");
    const auto key = std::make_pair(spec.group, spec.tensor.scalar_type());
    const auto [found, added] = index.emplace(key, spaces_.size());
    if (added) {
      FlatSpace space;
      space.group = spec.group;
      space.dtype = spec.tensor.scalar_type();
      spaces_.push_back(std::move(space));
    }
    places_[param].space = static_cast<int32_t>(found->second);
    places_[param].index = static_cast<int32_t>(spaces_[found->second].params.size());
    spaces_[found->second].params.push_back(static_cast<int32_t>(param));
  }
  for (FlatSpace& space : spaces_) {
    std::vector<int64_t> numels;
    for (int32_t param : space.params) numels.push_back(specs_[param].tensor.numel());
    space.layout = plan::flat_layout(numels, align, parts);
    space.shards = plan::slice_flat(space.layout, parts);
    const bool narrow = space.dtype == at::kHalf || space.dtype == at::kBFloat16;
    const auto options = at::TensorOptions().device(device_).dtype(space.dtype);
    space.lp = at::zeros({space.layout.total_numel}, options);
    for (size_t i = 0; i < space.params.size(); ++i) {
      const auto param = static_cast<size_t>(space.params[i]);
      places_[param].offset = space.layout.offsets[i];
      places_[param].numel = numels[i];
      at::Tensor& tensor = specs_[param].tensor;
      at::Tensor home = space.lp.narrow(0, places_[param].offset, places_[param].numel)
                            .as_strided(tensor.sizes(), kept_strides(tensor), places_[param].offset);
      home.copy_(tensor);
      tensor.set_data(home);
    }
    space.master = narrow ? space.lp.to(at::kFloat) : space.lp;
    const at::ScalarType accumulate = narrow ? grad_dtype.value_or(at::kFloat) : space.dtype;
    space.grad = at::zeros({space.layout.total_numel}, options.dtype(accumulate));
  }
}

at::Tensor ParamStore::view(size_t param, const at::Tensor& flat) const {
  const at::Tensor& tensor = specs_[param].tensor;
  return flat.as_strided(tensor.sizes(), tensor.strides(), flat.storage_offset() + places_[param].offset);
}

void ParamStore::release() {
  at::NoGradGuard no_grad;
  for (ParamSpec& spec : specs_) spec.tensor.set_data(spec.tensor.detach().clone());
}

}  // namespace ds::zero
