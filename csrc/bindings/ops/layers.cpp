// Operations of transformer layers (kernels/layer_ops.h) over torch tensors.
#include "kernels/layer_ops.h"

#include <torch/csrc/utils/pybind.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "base/thread_pool.h"
#include "bindings/ops/kernel_call.h"
#include "bindings/registry.h"
#include "bindings/torch_types.h"
#include "zero/device_context.h"

namespace py = pybind11;

namespace ds::bindings {
namespace {

using Maybe = c10::optional<at::Tensor>;
using kernels::Activation;
using kernels::ActivationRows;
using kernels::LayerKernels;
using kernels::NormRows;

class LayerOps {
 public:
  explicit LayerOps(int threads) : pool_(threads) {}

  // y, the sum x + bias + residual (undefined without either), mean (undefined for RMSNorm) and scale, of each row.
  std::tuple<at::Tensor, Maybe, Maybe, at::Tensor> norm(const at::Tensor& given, const Maybe& bias,
                                                        const Maybe& residual, const Maybe& weight, const Maybe& shift,
                                                        double eps, bool centered) {
    const at::Tensor x = given.detach().contiguous();
    const NormRows rows = rows_of(x, eps, centered);
    const Row bias_of(bias, x, "bias"), weight_of(weight, x, "weight"), shift_of(shift, x, "shift");
    const Row residual_of(residual, x, "residual", true);
    const at::Tensor y = at::empty_like(x), scale = statistics(x);
    Maybe sum, mean;
    if (bias.has_value() || residual.has_value()) sum = at::empty_like(x);
    if (centered) mean = statistics(x);
    on(x, [&](const LayerKernels& table, const kernels::Launch& launch) {
      table.norm(launch, rows, {x.data_ptr(), bias_of.data(), residual_of.data(), weight_of.data(), shift_of.data()},
                 {y.data_ptr(), data_of(sum), data_of(mean), scale.data_ptr()});
    });
    return {y, sum, mean, scale};
  }

  // dx, and the gradients of weight and shift in fp32 or fp64, which are empty without `weights`. `x`: what was
  // normalized; or none, and `y` is given.
  std::tuple<at::Tensor, at::Tensor, at::Tensor> norm_backward(const at::Tensor& dy, const Maybe& x, const Maybe& y,
                                                               const Maybe& weight, const Maybe& shift,
                                                               const Maybe& mean, const at::Tensor& scale,
                                                               const Maybe& more, bool weights) {
    const at::Tensor upper = dy.detach().contiguous();
    if (x.has_value() == y.has_value())
      fail(ErrorKind::kValue, "the gradient of a norm takes either what was normalized or the result");
    const NormRows rows = rows_of(upper, 0, mean.has_value());
    const Row given(x, upper, "x", true), result(y, upper, "y", true), rest(more, upper, "more", true),
        weight_of(weight, upper, "weight"), shift_of(shift, upper, "shift");
    const auto wide = statistics(upper).options();
    const int64_t size = weights ? upper.size(-1) : 0;
    const at::Tensor dx = at::empty_like(upper), dweight = at::empty({size}, wide), dshift = at::empty({size}, wide),
                     parts = at::empty({static_cast<int64_t>(kernels::kNormParts) * 2 * size}, wide);
    const auto wanted = [weights](const at::Tensor& t) { return weights ? t.data_ptr() : nullptr; };
    on(upper, [&](const LayerKernels& table, const kernels::Launch& launch) {
      table.norm_backward(
          launch, rows,
          {upper.data_ptr(), given.data(), result.data(), weight_of.data(), shift_of.data(), data_of(mean),
           scale.data_ptr(), rest.data(), dx.data_ptr(), wanted(dweight), wanted(dshift), wanted(parts)});
    });
    return {dx, dweight, dshift};
  }

  at::Tensor activation(const at::Tensor& given, const Maybe& bias, const std::string& kind, bool gated) {
    const at::Tensor x = given.detach().contiguous();
    const ActivationRows rows = activation_rows(x, kind, gated);
    const Row bias_of(bias, x, "bias");
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.back() = static_cast<int64_t>(rows.size);
    const at::Tensor y = at::empty(sizes, x.options());
    on(x, [&](const LayerKernels& table, const kernels::Launch& launch) {
      table.activation(launch, rows, x.data_ptr(), bias_of.data(), y.data_ptr());
    });
    return y;
  }

  at::Tensor activation_backward(const at::Tensor& dy, const at::Tensor& given, const Maybe& bias,
                                 const std::string& kind, bool gated) {
    const at::Tensor x = given.detach().contiguous(), upper = dy.detach().to(x.scalar_type()).contiguous();
    const ActivationRows rows = activation_rows(x, kind, gated);
    const Row bias_of(bias, x, "bias");
    const at::Tensor dx = at::empty_like(x);
    on(x, [&](const LayerKernels& table, const kernels::Launch& launch) {
      table.activation_backward(launch, rows, upper.data_ptr(), x.data_ptr(), bias_of.data(), dx.data_ptr());
    });
    return dx;
  }

  // dropout(x + bias) + residual; probability 0: no dropout.
  at::Tensor dropout(const at::Tensor& given, const Maybe& bias, const Maybe& residual, double probability,
                     uint64_t seed, uint32_t stream) {
    if (!(probability >= 0 && probability < 1))
      fail(ErrorKind::kValue, "dropout has a probability of 0 or more and less than 1, not ", probability);
    const at::Tensor x = given.detach().contiguous();
    const Row bias_of(bias, x, "bias"), residual_of(residual, x, "residual", true);
    const kernels::RowDropout how = {seed, static_cast<uint32_t>(probability * 4294967296.0),
                                     probability > 0 ? static_cast<float>(1 / (1 - probability)) : 0.0f, stream};
    const auto size = static_cast<size_t>(x.size(-1));
    const at::Tensor y = at::empty_like(x);
    on(x, [&](const LayerKernels& table, const kernels::Launch& launch) {
      table.dropout(launch, how, dtype_of(x), x.numel() / std::max<size_t>(size, 1), size, x.data_ptr(), bias_of.data(),
                    residual_of.data(), y.data_ptr());
    });
    return y;
  }

  // x: [..., tokens, heads, size] with a position for each of the tokens of the leading dimensions.
  at::Tensor rotary(const at::Tensor& given, const at::Tensor& positions, int64_t rotated, double base,
                    bool interleaved, bool back) {
    if (given.dim() < 2) fail(ErrorKind::kValue, "a rotary embedding takes [..., heads, size], got ", given.sizes());
    const at::Tensor x = given.detach().contiguous(), places = positions.to(x.device(), at::kLong).contiguous();
    const int64_t size = x.size(-1), heads = x.size(-2), tokens = places.numel();
    if (rotated < 0 || rotated > size || rotated % 2 != 0)
      fail(ErrorKind::kValue, "a rotary embedding turns an even number of the ", size, " features of a head, not ",
           rotated);
    if (tokens * heads * size != x.numel())
      fail(ErrorKind::kValue, "a rotary embedding of x ", x.sizes(), " takes a position for each token, got ",
           positions.sizes());
    const at::Tensor out = at::empty_like(x);
    const kernels::RotaryHeads how = {dtype_of(x),
                                      static_cast<size_t>(tokens),
                                      static_cast<size_t>(heads),
                                      static_cast<size_t>(size),
                                      static_cast<size_t>(rotated),
                                      heads * size,
                                      size,
                                      places.data_ptr<int64_t>(),
                                      base,
                                      interleaved,
                                      back};
    on(x, [&](const LayerKernels& table, const kernels::Launch& launch) {
      table.rotary(launch, how, x.data_ptr(), out.data_ptr());
    });
    return out;
  }

 private:
  // An operand that may be missing, of a row's elements, or `whole`: of all, in the dtype and on the device of x.
  class Row {
   public:
    Row(const Maybe& given, const at::Tensor& x, const char* name, bool whole = false) {
      if (!given.has_value()) return;
      kept_ = given->detach().contiguous();
      const int64_t wanted = whole ? x.numel() : x.size(-1);
      if (kept_.numel() != wanted || kept_.scalar_type() != x.scalar_type() || kept_.device() != x.device())
        fail(ErrorKind::kValue, name, " is ", kept_.toString(), " ", kept_.sizes(), " on ", kept_.device().str(),
             ": with x ", x.toString(), " ", x.sizes(), " it has ", wanted, " elements of that dtype on ",
             x.device().str());
    }
    const void* data() const { return kept_.defined() ? kept_.data_ptr() : nullptr; }

   private:
    at::Tensor kept_;
  };

  static void* data_of(const Maybe& t) { return t.has_value() ? t->data_ptr() : nullptr; }
  static DType dtype_of(const at::Tensor& t) {
    return t.scalar_type() == at::kDouble ? DType::kF64 : zero::kernel_dtype(t.scalar_type(), "a layer");
  }
  static at::Tensor statistics(const at::Tensor& x) {
    const auto wide = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    return at::empty({x.numel() / std::max<int64_t>(x.size(-1), 1)}, x.options().dtype(wide));
  }
  static NormRows rows_of(const at::Tensor& x, double eps, bool centered) {
    const auto size = static_cast<size_t>(x.size(-1));
    return {dtype_of(x), x.numel() / std::max<size_t>(size, 1), size, centered, static_cast<float>(eps)};
  }
  static ActivationRows activation_rows(const at::Tensor& x, const std::string& kind, bool gated) {
    const int64_t across = x.size(-1);
    if (gated && across % 2 != 0)
      fail(ErrorKind::kValue, "a gated activation halves rows, and ", across, " elements have no half");
    const auto size = static_cast<size_t>(gated ? across / 2 : across);
    return {dtype_of(x), x.numel() / std::max<size_t>(static_cast<size_t>(across), 1), size, kind_of(kind), gated};
  }
  static Activation kind_of(const std::string& name) {
    if (name == "gelu_tanh") return Activation::kGeluTanh;
    if (name == "gelu") return Activation::kGelu;
    if (name == "relu") return Activation::kRelu;
    if (name == "silu") return Activation::kSilu;
    fail(ErrorKind::kValue, "the activation '", name, "' is not one of gelu_tanh, gelu, relu, silu");
  }

  template <typename Call>
  void on(const at::Tensor& t, const Call& call) {
    call_kernels<LayerKernels>("an operation of a layer", &ds_layer_kernels, kernels::kLayerAbi, t, pool_, call);
  }

  ThreadPool pool_;
};

}  // namespace

DS_BINDINGS(m) {
  py::class_<LayerOps>(m, "LayerOps", "Operations of transformer layers (kernels/layer_ops.h) over tensors.")
      .def(py::init<int>(), "threads"_a)
      .def_static(
          "built_for",
          [](const std::string& device) { return ds_layer_kernels(kernels::kLayerAbi, device.c_str()) != nullptr; },
          "device"_a)
      .def("norm", &LayerOps::norm, "x"_a, "bias"_a, "residual"_a, "weight"_a, "shift"_a, "eps"_a, "centered"_a)
      .def("norm_backward", &LayerOps::norm_backward, "dy"_a, "x"_a, "y"_a, "weight"_a, "shift"_a, "mean"_a, "scale"_a,
           "more"_a, "weights"_a)
      .def("activation", &LayerOps::activation, "x"_a, "bias"_a, "kind"_a, "gated"_a)
      .def("activation_backward", &LayerOps::activation_backward, "dy"_a, "x"_a, "bias"_a, "kind"_a, "gated"_a)
      .def("dropout", &LayerOps::dropout, "x"_a, "bias"_a, "residual"_a, "probability"_a, "seed"_a, "stream"_a)
      .def("rotary", &LayerOps::rotary, "x"_a, "positions"_a, "rotated"_a, "base"_a, "interleaved"_a, "back"_a);
}

}  // namespace ds::bindings
