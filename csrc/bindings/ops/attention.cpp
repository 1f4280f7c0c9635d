// Attention of blocks (kernels/attention.h) over torch tensors.
#include "kernels/attention.h"

#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/thread_pool.h"
#include "bindings/ops/kernel_call.h"
#include "bindings/registry.h"
#include "bindings/torch_types.h"
#include "plan/block_layout.h"
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

// A layout of blocks, as lists on a device.
struct KeyBlocks {
  int64_t size = 0, heads = 1, rows = 0, columns = 0, pairs = 0;
  at::Tensor start, list, reader_start, readers;

  KeyBlocks to(const at::Device& device) const {
    KeyBlocks there = *this;
    for (at::Tensor* one : {&there.start, &there.list, &there.reader_start, &there.readers}) *one = one->to(device);
    return there;
  }
};

at::Tensor tensor_of(const std::vector<int32_t>& numbers) {
  const at::Tensor made = at::empty({static_cast<int64_t>(numbers.size())}, at::kInt);
  std::copy(numbers.begin(), numbers.end(), made.data_ptr<int32_t>());
  return made;
}

// layout: [heads, blocks of queries, blocks of keys] of whole numbers or bool.
KeyBlocks key_blocks(const at::Tensor& layout, int64_t size) {
  if (size < 1) fail(ErrorKind::kValue, "blocks of attention have 1 token or more, not ", size);
  if (layout.dim() != 3)
    fail(ErrorKind::kValue, "a layout of blocks is [heads, blocks of queries, blocks of keys], got ", layout.sizes());
  const at::Tensor seen = layout.ne(0).to(at::kCPU).contiguous();
  const plan::BlockLayout found(static_cast<const uint8_t*>(seen.data_ptr()), seen.size(0), seen.size(1), seen.size(2));
  return {size,
          found.heads(),
          found.rows(),
          found.columns(),
          found.pairs(),
          tensor_of(found.keys().start),
          tensor_of(found.keys().list),
          tensor_of(found.readers().start),
          tensor_of(found.readers().list)};
}

// The keys of a block that queries may see, and the changes that are made to scores.
struct BlockRules {
  double scale = 1, soft_cap = 0;
  bool causal = false;
  int64_t offset = 0, window = 0;
  c10::optional<at::Tensor> looks;  // bool, [batch or 1, 1, queries or 1, keys]
  kernels::AttentionDropout dropout = {};
  c10::optional<KeyBlocks> blocks;
  // [batch / inner or 1, inner or 1, heads or 1, queries or 1, keys or 1].
  std::vector<at::Tensor> biases;
  int64_t inner = 0;  // 0: the whole batch
};

using Tensors = std::vector<at::Tensor>;

class AttentionOps {
 public:
  explicit AttentionOps(int threads) : pool_(threads) {}

  // inputs: queries, keys, values; state: largest, total, sum.
  void forward(const Tensors& inputs, const Tensors& state, bool fresh, const BlockRules& rules) {
    check_count(inputs, 3, "inputs"), check_count(state, 3, "tensors of a state");
    const at::Tensor q = operand(inputs[0]), k = operand(inputs[1]), v = operand(inputs[2]);
    Tensors held;
    const AttentionShape shape = shape_of(q, k, v, rules, held);
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
    const at::Tensor q = operand(inputs[0]), k = operand(inputs[1]), v = operand(inputs[2]), g = upper_of(inputs);
    Tensors held;
    const AttentionShape shape = shape_of(q, k, v, rules, held);
    check_upper(shape, q, v, g);
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

  // As backward; found: of a bias, its lengths as in BlockRules.
  void bias_backward(const Tensors& inputs, const Tensors& statistics, int which, const at::Tensor& found,
                     const BlockRules& rules) {
    check_count(inputs, 4, "inputs"), check_count(statistics, 2, "statistics");
    const at::Tensor q = operand(inputs[0]), k = operand(inputs[1]), v = operand(inputs[2]), g = upper_of(inputs);
    Tensors held;
    const AttentionShape shape = shape_of(q, k, v, rules, held);
    check_upper(shape, q, v, g);
    if (which < 0 || which >= static_cast<int>(rules.biases.size()))
      fail(ErrorKind::kValue, "attention with ", rules.biases.size(), " biases has no bias ", which);
    const at::Tensor levels = statistics[0].contiguous(), less = statistics[1].contiguous();
    check_wide(q, {&levels, &less, &found}, {rows_of(shape), rows_of(shape), rules.biases[which].numel()});
    on(q, [&](const AttentionKernels& table, const kernels::Launch& launch) {
      table.bias_backward(launch, shape, view(q), view(k), view(v), view(g), levels.data_ptr(), less.data_ptr(), which,
                          found.data_ptr());
    });
  }

 private:
  static at::Tensor upper_of(const Tensors& inputs) { return operand(inputs[3].to(inputs[0].scalar_type())); }
  static void check_upper(const AttentionShape& shape, const at::Tensor& q, const at::Tensor& v, const at::Tensor& g) {
    if (g.size(0) != shape.batch || g.size(1) != shape.heads || g.size(2) != shape.queries ||
        g.size(3) != shape.value_size)
      fail(ErrorKind::kValue, "the gradient of attention over queries ", q.sizes(), " and values ", v.sizes(),
           " has not the shape ", g.sizes());
  }
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
                                 Tensors& held) {
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
    set_blocks(q, rules, shape);
    set_biases(q, rules, shape, held);
    if (!rules.looks.has_value()) return shape;
    const at::Tensor looks =
        rules.looks->stride(-1) == 1 || rules.looks->size(-1) == 1 ? *rules.looks : rules.looks->contiguous();
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
    held.push_back(looks);
    return shape;
  }

  static void set_blocks(const at::Tensor& q, const BlockRules& rules, AttentionShape& shape) {
    if (!rules.blocks.has_value()) return;
    const KeyBlocks& given = *rules.blocks;
    const auto blocks = [&](int64_t tokens) { return (tokens + given.size - 1) / given.size; };
    if ((given.heads != 1 && given.heads != shape.heads) || given.rows != blocks(shape.queries) ||
        given.columns != blocks(shape.keys) || given.list.device() != q.device())
      fail(ErrorKind::kValue, "a layout of ", given.heads, " heads with ", given.rows, " x ", given.columns,
           " blocks of ", given.size, " tokens on ", given.list.device().str(), " does not fit queries ", q.sizes(),
           " on ", q.device().str(), " and ", shape.keys, " keys");
    const bool alike = given.heads == 1;
    shape.blocks = {given.size,
                    given.start.data_ptr<int32_t>(),
                    given.list.data_ptr<int32_t>(),
                    alike ? 0 : given.rows + 1,
                    given.reader_start.data_ptr<int32_t>(),
                    given.readers.data_ptr<int32_t>(),
                    alike ? 0 : given.columns + 1};
  }

  static void set_biases(const at::Tensor& q, const BlockRules& rules, AttentionShape& shape, Tensors& held) {
    if (rules.biases.size() > kernels::kAttentionBiases)
      fail(ErrorKind::kValue, "attention adds at most ", kernels::kAttentionBiases, " biases to scores, got ",
           rules.biases.size());
    const int64_t inner = rules.inner > 0 ? rules.inner : std::max<int64_t>(shape.batch, 1);
    if (shape.batch % inner != 0)
      fail(ErrorKind::kValue, "a batch of ", shape.batch, " is not a multiple of the ", inner, " of biases");
    const std::vector<int64_t> whole = {shape.batch / inner, inner, shape.heads, shape.queries, shape.keys};
    for (size_t i = 0; i < rules.biases.size(); ++i) {
      const at::Tensor given = rules.biases[i].detach();
      bool fits = given.dim() == 5 && given.device() == q.device() &&
                  (given.scalar_type() == q.scalar_type() || given.scalar_type() == at::kFloat);
      bool gaps = false;
      for (int64_t dim = 0; fits && dim < 5; ++dim) {
        fits = given.size(dim) == 1 || given.size(dim) == whole[dim];
        gaps = gaps || (given.size(dim) > 1 && (given.stride(dim) == 0 || (dim == 4 && given.stride(dim) != 1)));
      }
      if (!fits)
        fail(ErrorKind::kValue, "bias ", i, " of attention over queries ", q.toString(), " ", q.sizes(), " and ",
             shape.keys, " keys is ", given.toString(), " ", given.sizes(), " on ", given.device().str(), ": it is ",
             "[", whole[0], ", ", inner, ", heads, queries, keys] or 1 in any of them, in fp32 or the dtype of the ",
             "queries, on their device");
      const at::Tensor bias = gaps ? given.contiguous() : given;
      const auto distance = [&](int64_t dim) { return bias.size(dim) == 1 ? 0 : bias.stride(dim); };
      shape.bias[i] = {bias.data_ptr(), dtype_of(bias), inner,       distance(0),
                       distance(1),     distance(2),    distance(3), distance(4)};
      held.push_back(bias);
    }
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
  py::class_<KeyBlocks>(m, "KeyBlocks", "Blocks of keys that each block of queries sees, as lists.")
      .def(py::init(&key_blocks), "layout"_a, "size"_a)
      .def(
          "to", [](const KeyBlocks& own, const at::Device& device) { return own.to(device); }, "device"_a)
      .def_readonly("size", &KeyBlocks::size)
      .def_readonly("heads", &KeyBlocks::heads)
      .def_readonly("rows", &KeyBlocks::rows)
      .def_readonly("columns", &KeyBlocks::columns)
      .def_readonly("pairs", &KeyBlocks::pairs);
  py::class_<BlockRules>(m, "BlockRules", "What queries may see of a block of keys, and what becomes of scores.")
      .def(py::init([](double scale, bool causal, int64_t offset, int64_t window, c10::optional<at::Tensor> looks,
                       double soft_cap, c10::optional<kernels::AttentionDropout> dropout,
                       c10::optional<KeyBlocks> blocks, std::vector<at::Tensor> biases, int64_t inner) {
             return BlockRules{scale,
                               soft_cap,
                               causal,
                               offset,
                               window,
                               std::move(looks),
                               dropout.value_or(kernels::AttentionDropout{}),
                               std::move(blocks),
                               std::move(biases),
                               inner};
           }),
           "scale"_a, "causal"_a = false, "offset"_a = 0, "window"_a = 0, "looks"_a = py::none(), "soft_cap"_a = 0.0,
           "dropout"_a = py::none(), "blocks"_a = py::none(), "biases"_a = std::vector<at::Tensor>(), "inner"_a = 0);
  py::class_<AttentionOps>(m, "AttentionOps", "Attention of blocks (kernels/attention.h) over tensors.")
      .def(py::init<int>(), "threads"_a)
      .def_static(
          "built_for",
          [](const std::string& device) {
            return ds_attention_kernels(kernels::kAttentionAbi, device.c_str()) != nullptr;
          },
          "device"_a)
      .def("forward", &AttentionOps::forward, "inputs"_a, "state"_a, "fresh"_a, "rules"_a)
      .def("merge", &AttentionOps::merge, "into"_a, "from_"_a)
      .def("backward", &AttentionOps::backward, "inputs"_a, "statistics"_a, "found"_a, "rules"_a)
      .def("bias_backward", &AttentionOps::bias_backward, "inputs"_a, "statistics"_a, "which"_a, "found"_a, "rules"_a);
}
