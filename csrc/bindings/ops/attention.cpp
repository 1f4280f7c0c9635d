// Attention of blocks (kernels/attention.h) over torch tensors.
#include "kernels/attention.h"

#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include <cstdint>
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

using kernels::AttentionKernels;
using kernels::AttentionOperand;
using kernels::AttentionShape;

// The probabilities of a block that are dropped ([Note: dropout] in kernels/philox.h).
kernels::AttentionDropout block_dropout(double probability, uint64_t seed, int64_t head, int64_t query, int64_t key) {
  if (!(probability >= 0 && probability < 1))
    fail(ErrorKind::kValue, "attention drops probabilities with a probability of 0 or more and less than 1, not ",
         probability);
  for (int64_t number : {head, query, key}) {
    if (number < 0 || number > UINT32_MAX)
      fail(ErrorKind::kValue, "heads, queries and keys have numbers of 32 bits where some are dropped, not ", number);
  }
  return {seed,
          static_cast<uint32_t>(probability * 4294967296.0),
          probability > 0 ? static_cast<float>(1 / (1 - probability)) : 0.0f,
          static_cast<uint32_t>(head),
          static_cast<uint32_t>(query),
          static_cast<uint32_t>(key)};
}

// The keys of a block that queries may see, and the changes that are made to scores.
struct BlockRules {
  double scale = 1, soft_cap = 0;
  bool causal = false;
  int64_t offset = 0, window = 0;
  c10::optional<at::Tensor> looks;  // bool, [batch or 1, 1, queries or 1, keys]
  kernels::AttentionDropout dropout = {};
};

using Tensors = std::vector<at::Tensor>;

class AttentionOps {
 public:
  explicit AttentionOps(int threads) : pool_(threads) {}

  // inputs: queries, keys, values; state: largest, total, sum.
  void forward(const Tensors& inputs, const Tensors& state, bool fresh, const BlockRules& rules) {
    check_count(inputs, 3, "inputs"), check_count(state, 3, "tensors of a state");
    const at::Tensor q = operand(inputs[0]), k = operand(inputs[1]), v = operand(inputs[2]);
    at::Tensor looks;
    const AttentionShape shape = shape_of(q, k, v, rules, looks);
    check_wide(q, {&state[0], &state[1], &state[2]},
               {rows_of(shape), rows_of(shape), rows_of(shape) * shape.value_size});
    on(q, [&](const AttentionKernels& table, const kernels::Launch& launch) {
      table.forward(launch, shape, view(q), view(k), view(v),
                    {state[0].data_ptr(), state[1].data_ptr(), state[2].data_ptr()}, fresh);
    });
  }

  void merge(const Tensors& into, const Tensors& from) {
    check_count(into, 3, "tensors of a state"), check_count(from, 3, "tensors of a state");
    for (size_t i = 0; i < 3; ++i) {
      if (into[i].sizes() != from[i].sizes() || into[i].scalar_type() != from[i].scalar_type() ||
          into[i].device() != from[i].device() || !into[i].is_contiguous() || !from[i].is_contiguous())
        fail(ErrorKind::kValue, "states of attention that are merged have one shape and dtype and no gaps, got ",
             into[i].toString(), " ", into[i].sizes(), " and ", from[i].toString(), " ", from[i].sizes());
    }
    const int64_t rows = into[0].numel();
    if (into[1].numel() != rows || (rows > 0 && into[2].numel() % rows != 0))
      fail(ErrorKind::kValue, "a state of attention of ", rows, " rows has no ", into[1].numel(), " totals and ",
           into[2].numel(), " sums");
    if (rows == 0) return;
    on(into[0], [&](const AttentionKernels& table, const kernels::Launch& launch) {
      table.merge(launch, {into[0].data_ptr(), into[1].data_ptr(), into[2].data_ptr()},
                  {from[0].data_ptr(), from[1].data_ptr(), from[2].data_ptr()}, dtype_of(into[0]),
                  static_cast<size_t>(rows), static_cast<size_t>(into[2].numel() / rows));
    });
  }

  // inputs: queries, keys, values, the gradient of the output; statistics: lse and row_sum; found: gradients of
  // queries, keys and values.
  void backward(const Tensors& inputs, const Tensors& statistics, const Tensors& found, const BlockRules& rules) {
    check_count(inputs, 4, "inputs"), check_count(statistics, 2, "statistics"), check_count(found, 3, "gradients");
    const at::Tensor q = operand(inputs[0]), k = operand(inputs[1]), v = operand(inputs[2]),
                     g = operand(inputs[3].to(q.scalar_type()));
    at::Tensor looks;
    const AttentionShape shape = shape_of(q, k, v, rules, looks);
    if (g.size(0) != shape.batch || g.size(1) != shape.heads || g.size(2) != shape.queries ||
        g.size(3) != shape.value_size)
      fail(ErrorKind::kValue, "the gradient of attention over queries ", q.sizes(), " and values ", v.sizes(),
           " has not the shape ", g.sizes());
    const at::Tensor levels = statistics[0].contiguous(), less = statistics[1].contiguous();
    const int64_t keys = shape.batch * shape.kv_heads * shape.keys;
    check_wide(
        q, {&levels, &less, &found[0], &found[1], &found[2]},
        {rows_of(shape), rows_of(shape), rows_of(shape) * shape.size, keys * shape.size, keys * shape.value_size});
    on(q, [&](const AttentionKernels& table, const kernels::Launch& launch) {
      table.backward(launch, shape, view(q), view(k), view(v), view(g), levels.data_ptr(), less.data_ptr(),
                     found[0].data_ptr(), found[1].data_ptr(), found[2].data_ptr());
    });
  }

 private:
  static void check_count(const Tensors& tensors, size_t count, const char* what) {
    if (tensors.size() != count)
      fail(ErrorKind::kValue, "attention of blocks takes ", count, " ", what, ", got ", tensors.size());
  }
  static DType dtype_of(const at::Tensor& t) {
    return t.scalar_type() == at::kDouble ? DType::kF64 : zero::kernel_dtype(t.scalar_type(), "attention");
  }
  static int64_t rows_of(const AttentionShape& s) { return s.batch * s.heads * s.queries; }
  static at::Tensor operand(const at::Tensor& t) {
    if (t.dim() != 4)
      fail(ErrorKind::kValue, "attention of blocks takes [batch, heads, tokens, size], got ", t.sizes());
    return t.stride(3) == 1 || t.size(3) == 1 ? t.detach() : t.detach().contiguous();
  }
  static AttentionOperand view(const at::Tensor& t) { return {t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)}; }

  static AttentionShape shape_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const BlockRules& rules,
                                 at::Tensor& looks) {
    if (k.size(0) != q.size(0) || v.size(0) != q.size(0) || v.size(1) != k.size(1) || v.size(2) != k.size(2) ||
        k.size(3) != q.size(3) || k.size(1) < 1 || q.size(1) % k.size(1) != 0 || q.size(3) < 1 ||
        k.scalar_type() != q.scalar_type() || v.scalar_type() != q.scalar_type())
      fail(ErrorKind::kValue, "queries ", q.toString(), " ", q.sizes(), ", keys ", k.toString(), " ", k.sizes(),
           " and values ", v.toString(), " ", v.sizes(), " do not belong together: one dtype and batch, query heads a ",
           "multiple of key/value heads, as many values as keys");
    AttentionShape shape = {};
    shape.dtype = dtype_of(q);
    shape.batch = q.size(0), shape.heads = q.size(1), shape.kv_heads = k.size(1);
    shape.queries = q.size(2), shape.keys = k.size(2), shape.size = q.size(3), shape.value_size = v.size(3);
    shape.scale = static_cast<float>(rules.scale), shape.soft_cap = static_cast<float>(rules.soft_cap);
    shape.causal = rules.causal, shape.offset = rules.offset, shape.window = rules.window;
    shape.dropout = rules.dropout;
    if (!rules.looks.has_value()) return shape;
    looks = rules.looks->stride(-1) == 1 || rules.looks->size(-1) == 1 ? *rules.looks : rules.looks->contiguous();
    if (looks.scalar_type() != at::kBool || looks.dim() != 4 || looks.size(1) != 1 ||
        (looks.size(0) != 1 && looks.size(0) != shape.batch) ||
        (looks.size(2) != 1 && looks.size(2) != shape.queries) || looks.size(3) != shape.keys ||
        looks.device() != q.device())
      fail(ErrorKind::kValue, "where queries ", q.sizes(), " may look among ", shape.keys,
           " keys is bool, [batch or 1, 1, queries or 1, keys], on their device; got ", looks.toString(), " ",
           looks.sizes());
    shape.looks = static_cast<const uint8_t*>(looks.data_ptr());
    shape.looks_batch = looks.size(0) == 1 ? 0 : looks.stride(0);
    shape.looks_query = looks.size(2) == 1 ? 0 : looks.stride(2);
    return shape;
  }

  static void check_wide(const at::Tensor& q, const std::vector<const at::Tensor*>& tensors,
                         const std::vector<int64_t>& numels) {
    const at::ScalarType wide = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor& t = *tensors[i];
      if (t.scalar_type() != wide || t.numel() != numels[i] || !t.is_contiguous() || t.device() != q.device())
        fail(ErrorKind::kValue, "attention over queries ", q.toString(), " ", q.sizes(), " has ", numels[i],
             " numbers of ", wide, " here, without gaps; got ", t.toString(), " ", t.sizes());
    }
  }

  template <typename Call>
  void on(const at::Tensor& t, const Call& call) {
    call_kernels<kernels::AttentionKernels>("attention of blocks", &ds_attention_kernels, kernels::kAttentionAbi, t,
                                            pool_, call);
  }

  ThreadPool pool_;
};

}  // namespace
}  // namespace ds::bindings

DS_BINDINGS(m) {
  using namespace ds::bindings;
  namespace kernels = ds::kernels;
  py::class_<kernels::AttentionDropout>(m, "BlockDropout", "Which probabilities of a block are dropped.")
      .def(py::init(&block_dropout), "probability"_a, "seed"_a, "head"_a = 0, "query"_a = 0, "key"_a = 0);
  py::class_<BlockRules>(m, "BlockRules", "What queries may see of a block of keys, and what becomes of scores.")
      .def(py::init([](double scale, bool causal, int64_t offset, int64_t window, c10::optional<at::Tensor> looks,
                       double soft_cap, c10::optional<kernels::AttentionDropout> dropout) {
             return BlockRules{scale,
                               soft_cap,
                               causal,
                               offset,
                               window,
                               std::move(looks),
                               dropout.value_or(kernels::AttentionDropout{})};
           }),
           "scale"_a, "causal"_a = false, "offset"_a = 0, "window"_a = 0, "looks"_a = py::none(), "soft_cap"_a = 0.0,
           "dropout"_a = py::none());
  py::class_<AttentionOps>(m, "AttentionOps", "Attention of blocks (kernels/attention.h) over tensors.")
      .def(py::init<int>(), "threads"_a)
      .def("forward", &AttentionOps::forward, "inputs"_a, "state"_a, "fresh"_a, "rules"_a)
      .def("merge", &AttentionOps::merge, "into"_a, "from_"_a)
      .def("backward", &AttentionOps::backward, "inputs"_a, "statistics"_a, "found"_a, "rules"_a);
}
