// Kernels and plans of a mixture of experts over torch tensors.
#include "kernels/routes.h"

#include <torch/csrc/utils/pybind.h>

#include <ATen/ops/addmm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "base/ranges.h"
#include "base/thread_pool.h"
#include "bindings/ops/kernel_call.h"
#include "bindings/registry.h"
#include "bindings/torch_types.h"
#include "parallel/result_memory.h"
#include "plan/route_plan.h"
#include "zero/device_context.h"

namespace py = pybind11;

namespace ds::bindings {
namespace {

using Maybe = c10::optional<at::Tensor>;
using kernels::GemmGroup;
using kernels::RouteKernels;

at::Tensor int_tensor(const std::vector<int32_t>& values, const at::Device& device) {
  auto* data = const_cast<int32_t*>(values.data());
  return at::from_blob(data, {static_cast<int64_t>(values.size())}, at::kInt).clone().to(device);
}

// The choices in host memory. Those of a step that is planned have no values: all experts get as many.
at::Tensor on_host(const at::Tensor& experts, int64_t num_experts) {
  if (!experts.is_meta()) return experts.to(at::kCPU, at::kInt).contiguous();
  const c10::impl::ExcludeDispatchKeyGuard unseen(c10::python_ks);
  return at::arange(experts.numel(), at::kInt).remainder_(num_experts).view(experts.sizes());
}

// A plan with the tensors that it was made of.
class TensorRoutes {
 public:
  TensorRoutes(const at::Tensor& experts, int64_t num_experts, int64_t capacity, bool choices_first,
               const Maybe& priority)
      : device_(experts.device()), experts_(on_host(experts, num_experts)) {
    if (experts_.dim() != 2) fail(ErrorKind::kValue, "a plan of routes takes choices of shape [tokens, k]");
    at::Tensor by;
    if (priority.has_value() && !priority->is_meta()) by = priority->to(at::kCPU, at::kFloat).contiguous();
    if (by.defined() && by.numel() != experts_.numel())
      fail(ErrorKind::kValue, "a plan of routes takes one priority for each of ", experts_.numel(), " choices, got ",
           by.numel());
    const plan::RouteRules rules = {num_experts, std::max<int64_t>(1, experts_.size(1)), capacity, choices_first};
    py::gil_scoped_release unlocked;
    plan_ = plan::plan_routes(chosen(), experts_.numel(), rules, by.defined() ? by.data_ptr<float>() : nullptr);
  }

  const std::vector<int64_t>& wanted() const { return plan_.wanted; }
  const std::vector<int64_t>& kept() const { return plan_.kept; }
  at::Tensor location() const { return int_tensor(plan_.location, device_).view(experts_.sizes()); }
  at::Tensor slots(int64_t capacity) const {
    return int_tensor(plan_.slots(chosen(), capacity), device_).view(experts_.sizes());
  }
  at::Tensor sources(int64_t capacity) const { return int_tensor(plan_.sources(chosen(), capacity), device_); }

 private:
  const int32_t* chosen() const { return experts_.data_ptr<int32_t>(); }

  at::Device device_;
  at::Tensor experts_;
  plan::RoutePlan plan_;
};

// The kernels, with worker threads for those of the CPU.
class RouteOps {
 public:
  // `torch_products`: grouped products on the CPU, too, are torch's; else on other devices alone.
  RouteOps(int threads, bool torch_products) : pool_(threads), torch_products_(torch_products) {}

  std::tuple<at::Tensor, at::Tensor> topk_gate(const at::Tensor& logits, int64_t k, const Maybe& select) {
    if (logits.dim() != 2 || k < 1 || k > logits.size(1))
      fail(ErrorKind::kValue, "a gate takes logits of shape [tokens, experts] and 1 <= k <= experts, got ",
           logits.sizes(), " and k = ", k);
    const at::Tensor x = whole(logits, at::kFloat), by = select.has_value() ? whole(*select, at::kFloat) : at::Tensor();
    if (by.defined() && by.sizes() != x.sizes())
      fail(ErrorKind::kValue, "a gate chooses by numbers of the logits' shape ", x.sizes(), ", got ", by.sizes());
    at::Tensor probs = at::empty(x.sizes(), x.options()),
               index = at::empty({x.size(0), k}, x.options().dtype(at::kInt));
    on(x, [&](const RouteKernels& table, const kernels::Launch& launch) {
      table.topk_gate(launch, x.data_ptr<float>(), by.defined() ? by.data_ptr<float>() : nullptr, x.size(0), x.size(1),
                      k, probs.data_ptr<float>(), index.data_ptr<int32_t>());
    });
    return {probs, index};
  }

  at::Tensor permute_rows(const at::Tensor& src, const at::Tensor& index, int64_t divisor, const Maybe& weight) {
    const at::Tensor from = matrix(src), by = whole(index, at::kInt), factors = weights(weight);
    at::Tensor out = at::empty({by.numel(), from.size(1)}, from.options());
    on(from, [&](const RouteKernels& table, const kernels::Launch& launch) {
      table.permute_rows(launch, out.data_ptr(), from.data_ptr(), dtype_of(from), from.size(1), by.numel(),
                         by.data_ptr<int32_t>(), data(factors), divisor);
    });
    return out;
  }

  at::Tensor combine_rows(const at::Tensor& src, const at::Tensor& slots, const Maybe& weight) {
    const at::Tensor from = matrix(src), at = slots_of(slots), factors = weights(weight);
    at::Tensor out = at::empty({at.size(0), from.size(1)}, from.options());
    on(from, [&](const RouteKernels& table, const kernels::Launch& launch) {
      table.combine_rows(launch, out.data_ptr(), from.data_ptr(), dtype_of(from), from.size(1), at.size(0), at.size(1),
                         at.data_ptr<int32_t>(), data(factors));
    });
    return out;
  }

  at::Tensor dot_rows(const at::Tensor& src, const at::Tensor& grad, const at::Tensor& slots) {
    const at::Tensor from = matrix(src), by = whole(matrix(grad), from.scalar_type()), at = slots_of(slots);
    if (by.size(0) != at.size(0) || by.size(1) != from.size(1))
      fail(ErrorKind::kValue, "dot_rows: gradients of shape ", by.sizes(), " for ", at.size(0), " tokens of width ",
           from.size(1));
    at::Tensor out = at::empty(at.sizes(), from.options().dtype(at::kFloat));
    on(from, [&](const RouteKernels& table, const kernels::Launch& launch) {
      table.dot_rows(launch, out.data_ptr<float>(), from.data_ptr(), by.data_ptr(), dtype_of(from), from.size(1),
                     at.size(0), at.size(1), at.data_ptr<int32_t>());
    });
    return out;
  }

  // The next rows[g] rows of x times weights[g], turned, plus biases[g] (or none at all).
  at::Tensor grouped_linear(const at::Tensor& x, const std::vector<int64_t>& rows, std::vector<at::Tensor> weights,
                            std::vector<at::Tensor> biases) {
    const at::Tensor from = matrix(x);
    check_groups(from, rows, weights, biases);
    at::Tensor out = at::empty({from.size(0), weights[0].size(0)}, from.options());
    std::vector<GemmGroup> groups;
    int64_t first = 0;
    for (size_t g = 0; g < rows.size(); first += rows[g++])
      groups.push_back({row(from, first), weights[g].data_ptr(), biases.empty() ? nullptr : biases[g].data_ptr(),
                        row(out, first), rows[g], out.size(1), from.size(1)});
    multiply(from, groups, {false, true});
    return out;
  }

  // Returns the gradients of grouped_linear, given that of its result: of x where `wants_x` (else None), of weights[g],
  // and of biases[g] where `biased`. `stacked`: one tensor for all weights.
  std::tuple<py::object, std::vector<at::Tensor>, std::vector<at::Tensor>> grouped_linear_grads(
      const at::Tensor& x, const at::Tensor& grad, const std::vector<int64_t>& rows, std::vector<at::Tensor> weights,
      bool wants_x, bool wants_weights, bool biased, bool stacked) {
    const at::Tensor from = matrix(x), by = whole(matrix(grad), from.scalar_type());
    std::vector<at::Tensor> none;
    check_groups(from, rows, weights, none);
    at::Tensor grad_x = wants_x ? at::empty(from.sizes(), from.options()) : at::Tensor();
    std::vector<at::Tensor> grad_weights, grad_biases;
    std::vector<GemmGroup> inputs, products;
    const int64_t in = from.size(1), out = by.size(1), each = out * in * static_cast<int64_t>(from.element_size());
    if (wants_weights && stacked)
      grad_weights.push_back(
          memory_->take({static_cast<int64_t>(rows.size()), out, in}, {0, 1, 2}, weights[0].options()));
    int64_t first = 0;
    for (size_t g = 0; g < rows.size(); first += rows[g++]) {
      if (wants_x)
        inputs.push_back({row(by, first), weights[g].data_ptr(), nullptr, row(grad_x, first), rows[g], in, out});
      if (wants_weights) {
        if (!stacked) grad_weights.push_back(at::empty(weights[g].sizes(), weights[g].options()));
        char* into =
            static_cast<char*>(grad_weights.back().data_ptr()) + (stacked ? static_cast<int64_t>(g) * each : 0);
        products.push_back({row(by, first), row(from, first), nullptr, into, out, in, rows[g]});
      }
      if (biased) grad_biases.push_back(by.narrow(0, first, rows[g]).sum(0));
    }
    multiply(from, inputs, {false, false});
    multiply(from, products, {true, false});
    py::object input = wants_x ? py::cast(grad_x) : py::object(py::none());
    return {input, grad_weights, grad_biases};
  }

 private:
  static at::Tensor whole(const at::Tensor& t, at::ScalarType type) { return t.detach().to(type).contiguous(); }
  static at::Tensor matrix(const at::Tensor& t) {
    if (t.dim() != 2) fail(ErrorKind::kValue, "rows of experts are a matrix, got the shape ", t.sizes());
    return t.detach().contiguous();
  }
  static at::Tensor slots_of(const at::Tensor& t) { return whole(matrix(t), at::kInt); }
  static at::Tensor weights(const Maybe& t) { return t.has_value() ? whole(*t, at::kFloat) : at::Tensor(); }
  static const float* data(const at::Tensor& t) { return t.defined() ? t.data_ptr<float>() : nullptr; }
  static DType dtype_of(const at::Tensor& t) {
    return t.scalar_type() == at::kDouble ? DType::kF64 : zero::kernel_dtype(t.scalar_type(), "rows of experts");
  }
  static void* row(const at::Tensor& t, int64_t r) {
    return static_cast<char*>(t.data_ptr()) + r * t.size(1) * static_cast<int64_t>(t.element_size());
  }

  static void check_groups(const at::Tensor& x, const std::vector<int64_t>& rows, std::vector<at::Tensor>& weights,
                           std::vector<at::Tensor>& biases) {
    if (weights.empty() || weights.size() != rows.size() || (!biases.empty() && biases.size() != rows.size()) ||
        sum_of(rows) != x.size(0))
      fail(ErrorKind::kValue, "a grouped product of ", x.size(0),
           " rows takes counts that add up to them, and a weight ", "for each; got ", rows.size(), " counts, ",
           weights.size(), " weights, ", biases.size(), " biases");
    for (at::Tensor& w : weights) {
      if (w.dim() != 2 || w.size(1) != x.size(1) || w.size(0) != weights[0].size(0) ||
          w.scalar_type() != x.scalar_type())
        fail(ErrorKind::kValue, "a grouped product of rows of ", x.toString(), " of width ", x.size(1),
             " takes weights of [out, ", x.size(1), "] of one dtype and shape, got ", w.toString(), " ", w.sizes());
      w = w.detach().contiguous();
    }
    for (at::Tensor& b : biases) b = b.detach().to(x.scalar_type()).contiguous();
  }

  void multiply(const at::Tensor& like, const std::vector<GemmGroup>& groups, kernels::GemmForm form) {
    if (groups.empty() || like.is_meta()) return;
    if (torch_products_ || !like.device().is_cpu()) return multiply_by_torch(like, groups, form);
    on(like, [&](const RouteKernels& table, const kernels::Launch& launch) {
      table.grouped_gemm(launch, groups.data(), groups.size(), form, dtype_of(like));
    });
  }

  // One product after the other: cuBLAS uses tensor cores, which the kernel of the table does not. Products of 16-bit
  // numbers on the CPU are made in fp32 and rounded once, as that kernel does: torch's own may add in 16 bits.
  static void multiply_by_torch(const at::Tensor& like, const std::vector<GemmGroup>& groups, kernels::GemmForm form) {
    const c10::DeviceGuard guard(like.device());
    const c10::NoGradGuard no_grad;
    const auto matrix = [&](const void* data, int64_t rows, int64_t columns, bool turned) {
      const std::vector<int64_t> sizes = {turned ? columns : rows, turned ? rows : columns};
      const at::Tensor made = at::from_blob(const_cast<void*>(data), sizes, like.options());
      return turned ? made.t() : made;
    };
    const bool wide = like.device().is_cpu() && c10::elementSize(like.scalar_type()) == 2;
    const auto factor = [&](const at::Tensor& t) { return wide ? t.to(at::kFloat) : t; };
    py::gil_scoped_release unlocked;
    for (const GemmGroup& g : groups) {
      if (g.m == 0 || g.n == 0) continue;
      const at::Tensor c = matrix(g.c, g.m, g.n, false);
      if (g.k == 0) {  // torch takes no pointers to a device's memory where there is none
        c.zero_();
        if (g.bias != nullptr) c.add_(at::from_blob(const_cast<void*>(g.bias), {g.n}, like.options()));
        continue;
      }
      const at::Tensor a = factor(matrix(g.a, g.m, g.k, form.a_turned));
      const at::Tensor b = factor(matrix(g.b, g.k, g.n, form.b_turned));
      at::Tensor made = wide ? at::empty(c.sizes(), a.options()) : c;
      if (g.bias == nullptr) {
        at::mm_out(made, a, b);
      } else {
        at::addmm_out(made, factor(at::from_blob(const_cast<void*>(g.bias), {g.n}, like.options())), a, b);
      }
      if (wide) c.copy_(made);
    }
  }

  template <typename Call>
  void on(const at::Tensor& t, const Call& call) {
    call_kernels<kernels::RouteKernels>("experts", &ds_route_kernels, kernels::kRouteAbi, t, pool_, call);
  }

  ThreadPool pool_;
  const bool torch_products_;
  const std::shared_ptr<parallel::ResultMemory> memory_ = std::make_shared<parallel::ResultMemory>();
};

}  // namespace
}  // namespace ds::bindings

DS_BINDINGS(m) {
  using namespace ds::bindings;
  py::class_<TensorRoutes>(m, "RoutePlan", "Which of the experts' rows each choice of a token gets (route_plan.h).")
      .def(py::init<const at::Tensor&, int64_t, int64_t, bool, const c10::optional<at::Tensor>&>(), "experts"_a,
           "num_experts"_a, "capacity"_a = -1, "choices_first"_a = false, "priority"_a = py::none())
      .def_property_readonly("wanted", &TensorRoutes::wanted)
      .def_property_readonly("kept", &TensorRoutes::kept)
      .def("location", &TensorRoutes::location)
      .def("slots", &TensorRoutes::slots, "capacity"_a = -1)
      .def("sources", &TensorRoutes::sources, "capacity"_a = -1);
  m.def(
      "plan_arrivals",
      [](const std::vector<int64_t>& counts, int64_t ranks, int64_t experts) {
        const ds::plan::ArrivalPlan plan = ds::plan::plan_arrivals(counts, ranks, experts);
        return py::make_tuple(plan.from_rank, plan.of_expert, int_tensor(plan.order, at::kCPU));
      },
      "counts"_a, "ranks"_a, "experts"_a,
      "(rows from each rank, rows of each expert, which arrived row each row expert by expert is)");
  py::class_<RouteOps>(m, "RouteOps", "Kernels of a mixture of experts (kernels/routes.h) over tensors.")
      .def(py::init<int, bool>(), "threads"_a, "torch_products"_a = false)
      .def("topk_gate", &RouteOps::topk_gate, "logits"_a, "k"_a, "select"_a = py::none())
      .def("permute_rows", &RouteOps::permute_rows, "src"_a, "index"_a, "divisor"_a = 1, "weight"_a = py::none())
      .def("combine_rows", &RouteOps::combine_rows, "src"_a, "slots"_a, "weight"_a = py::none())
      .def("dot_rows", &RouteOps::dot_rows, "src"_a, "grad"_a, "slots"_a)
      .def("grouped_linear", &RouteOps::grouped_linear, "x"_a, "rows"_a, "weights"_a,
           "biases"_a = std::vector<at::Tensor>())
      .def("grouped_linear_grads", &RouteOps::grouped_linear_grads, "x"_a, "grad"_a, "rows"_a, "weights"_a, "wants_x"_a,
           "wants_weights"_a, "biased"_a, "stacked"_a = false);
}
