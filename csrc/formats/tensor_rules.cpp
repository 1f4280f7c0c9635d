// torch's tensors and numpy's arrays, as the functions that rebuild them are called.
#include <string>

#include "formats/format_error.h"
#include "formats/graph_builder.h"
#include "formats/plain_rules.h"

namespace ds::formats {
namespace {

using Builder = GraphBuilder;

bool no_hooks(const Builder& b, Ref ref) {
  if (b.is(ref, Kind::kNone)) return true;
  if (!b.has_contents(ref)) return false;
  size_t count;
  b.items_of(ref, &count);
  return count == 0;
}

bool is_true(const Builder& b, Ref ref) {
  need(b.is(ref, Kind::kBool) || b.is(ref, Kind::kInt), "a flag of something else");
  return b.node(ref).number != 0;
}

int64_t integer(const Builder& b, Ref ref, const char* what) {
  need(b.is(ref, Kind::kInt), what);
  return b.node(ref).number;
}

std::vector<int64_t> integers(const Builder& b, Ref ref, const char* what) {
  if (b.is_object_of(ref, "torch", "Size")) {
    const Node& size = b.node(ref);
    return size.count < 2 ? std::vector<int64_t>() : integers(b, b.graph().parts_of(ref)[1], what);
  }
  need(b.is(ref, Kind::kTuple) || b.is(ref, Kind::kList), what);
  size_t count;
  const Ref* items = b.items_of(ref, &count);
  std::vector<int64_t> found;
  found.reserve(count);
  for (size_t i = 0; i < count; ++i) found.push_back(integer(b, items[i], what));
  return found;
}

Ref make_tensor(Builder& b, const Ref* a, bool requires_grad, const Element* element) {
  need(b.is(a[0], Kind::kStorage), "a tensor without a storage");
  StoredTensor tensor;
  tensor.storage = b.node(a[0]).index;
  tensor.element = element != nullptr ? element : b.graph().storages[tensor.storage].element;
  tensor.offset = integer(b, a[1], "a tensor that begins nowhere");
  tensor.shape = integers(b, a[2], "sizes that are not integers");
  tensor.stride = integers(b, a[3], "strides that are not integers");
  tensor.requires_grad = requires_grad;
  return b.tensor(std::move(tensor));
}

Ref tensor_v1(Builder& b, Ref, const Ref* a, size_t n) {
  need(n == 4, "a tensor of other parts");
  return make_tensor(b, a, false, nullptr);
}

Ref tensor_v2(Builder& b, Ref, const Ref* a, size_t n) {
  need(n >= 4 && n <= 7, "a tensor of other parts");
  need(n < 6 || no_hooks(b, a[5]), "a tensor with hooks");
  return make_tensor(b, a, n > 4 && is_true(b, a[4]), nullptr);
}

Ref tensor_v3(Builder& b, Ref, const Ref* a, size_t n) {
  need((n == 7 || n == 8) && no_hooks(b, a[5]), "a tensor with hooks");
  need(b.is(a[6], Kind::kGlobal) && b.global_of(a[6]).module == "torch", "a tensor without a dtype");
  const Element* element = element_by_dtype(b.global_of(a[6]).name);
  need(element != nullptr, "a tensor without a dtype");
  return make_tensor(b, a, is_true(b, a[4]), element);
}

bool is_parameter(const Builder& b, Ref ref) { return b.is_object_of(ref, "torch._utils", "_rebuild_parameter"); }

Ref parameter(Builder& b, Ref function, const Ref* a, size_t n) {
  need(n == 2 || n == 3, "a parameter of other parts");
  need(n < 3 || no_hooks(b, a[2]), "a parameter with hooks");
  need(b.is(a[0], Kind::kTensor) || is_parameter(b, a[0]), "a parameter of something else");
  const Ref parts[] = {a[0], b.boolean(is_true(b, a[1]))};
  return b.object(Call::kReduce, function, parts, 2);
}

// Its state, attributes that a user has set, is dropped: the other tensors of the table have none.
Ref parameter_with_state(Builder& b, Ref function, const Ref* a, size_t n) {
  need(n == 4, "a parameter of other parts");
  Global plain = b.global_of(function);
  NameResolver table;
  plain = table.find("torch._utils", "_rebuild_parameter");
  return parameter(b, b.global(plain), a, 3);
}

Ref sparse(Builder& b, Ref function, const Ref* a, size_t n) {
  need(n == 2 && b.is(a[1], Kind::kTuple) && b.node(a[1]).count >= 3, "a sparse tensor of this layout");
  const Ref* data = b.graph().parts_of(a[1]);
  for (int i = 0; i < 2; ++i) {
    need(b.is(data[i], Kind::kTensor) || is_parameter(b, data[i]), "a sparse tensor of something else");
  }
  __int128 numel = 1;
  for (const int64_t size : integers(b, data[2], "sizes that are not integers")) {
    numel *= size;
    need(size >= 0 && numel < (__int128{1} << 63), "a sparse tensor of this size");
  }
  return b.object(Call::kReduce, function, a, n);
}

// torch._tensor._rebuild_from_type_v2(function, class, arguments, state)
Ref from_type(Builder& b, Ref, const Ref* a, size_t n) {
  need(n == 4 && b.is(a[0], Kind::kGlobal) && b.is(a[2], Kind::kTuple), "a tensor of no kind");
  const Ref function = a[0];
  const bool known = b.is_global(function, "torch._utils", "_rebuild_tensor_v2") ||
                     b.is_global(function, "torch._utils", "_rebuild_tensor_v3") ||
                     b.is_global(function, "torch._utils", "_rebuild_parameter");
  need(known, "a tensor of no kind");
  const bool wrapped =
      b.is_global(a[1], "torch.nn.parameter", "Parameter") || b.is_global(a[1], "torch.nn", "Parameter");
  need(wrapped || b.is_global(a[1], "torch", "Tensor"), "a tensor of another class");
  const std::vector<Ref> arguments(b.graph().parts_of(a[2]), b.graph().parts_of(a[2]) + b.node(a[2]).count);
  const Ref made = b.call(Call::kReduce, function, arguments.data(), arguments.size());
  if (!wrapped || is_parameter(b, made)) return made;
  const Ref parts[] = {made, b.boolean(b.graph().tensors[b.node(made).index].requires_grad)};
  NameResolver table;
  return parameter(b, b.global(table.find("torch._utils", "_rebuild_parameter")), parts, 2);
}

Ref layout(Builder& b, Ref function, const Ref* a, size_t n) {
  need(n == 1 && b.is(a[0], Kind::kText), "a layout without a name");
  return b.object(Call::kReduce, function, a, n);
}

Ref size(Builder& b, Ref cls, const Ref* a, size_t n) {
  need(n <= 1, "sizes of several things");
  if (n == 1) integers(b, a[0], "sizes that are not integers");
  return b.object(Call::kReduce, cls, a, n);
}

Ref device(Builder& b, Ref cls, const Ref* a, size_t n) {
  for (size_t i = 0; i < n; ++i) need(b.is(a[i], Kind::kText) || b.is(a[i], Kind::kInt), "a device of something else");
  return b.object(Call::kReduce, cls, a, n);
}

Ref generator(Builder& b, Ref cls, const Ref* a, size_t n) {
  need(n <= 1 && (n == 0 || b.is(a[0], Kind::kText) || b.is_object_of(a[0], "torch", "device")),
       "a generator of something else");
  return b.object(Call::kReduce, cls, a, n);
}

// ---- numpy: who makes the arrays looks at their dtype and at their sizes
// ------------------------------------------------
Ref empty_array(Builder& b, Ref function, const Ref* a, size_t n) {
  need(n == 3 && b.is_global(a[0], "numpy", "ndarray") && b.is(a[1], Kind::kTuple) && b.node(a[1]).count == 1 &&
           b.is(b.graph().parts_of(a[1])[0], Kind::kInt) && b.node(b.graph().parts_of(a[1])[0]).number == 0,
       "an array of another class");
  return b.object(Call::kReduce, function, nullptr, 0);
}

bool is_raw(const Builder& b, Ref ref) { return b.is(ref, Kind::kBytes) || b.is(ref, Kind::kByteArray); }

bool is_dtype(const Builder& b, Ref ref) { return b.is_object_of(ref, "numpy", "dtype"); }

Ref scalar(Builder& b, Ref function, const Ref* a, size_t n) {
  need(n == 2 && is_dtype(b, a[0]) && (b.is(a[1], Kind::kText) || b.is(a[1], Kind::kBytes)), "a number of objects");
  return b.object(Call::kReduce, function, a, n);
}

Ref from_buffer(Builder& b, Ref function, const Ref* a, size_t n) {
  need(n == 4 && is_raw(b, a[0]) && is_dtype(b, a[1]) && b.is(a[3], Kind::kText), "an array of something else");
  integers(b, a[2], "an array's shape");
  return b.object(Call::kReduce, function, a, n);
}

Ref dtype(Builder& b, Ref cls, const Ref* a, size_t n) {
  need(n >= 1 && n <= 3 && b.is(a[0], Kind::kText) && b.text_of(a[0]).size() < 64, "a dtype of something else");
  return b.object(Call::kReduce, cls, a, 1);  // align and copy say nothing about a plain one
}

}  // namespace

std::vector<Rule> tensor_rules() {
  constexpr std::string_view kU = "torch._utils";
  std::vector<Rule> rules = {
      {kU, "_rebuild_tensor", tensor_v1},
      {kU, "_rebuild_tensor_v2", tensor_v2},
      {kU, "_rebuild_tensor_v3", tensor_v3},
      {kU, "_rebuild_parameter", parameter},
      {kU, "_rebuild_parameter_with_state", parameter_with_state},
      {kU, "_rebuild_sparse_tensor", sparse},
      {"torch._tensor", "_rebuild_from_type_v2", from_type},
      {"torch.serialization", "_get_layout", layout, Rule::kNoState, true},
      {"torch", "Tensor", nullptr},
      {"torch.nn.parameter", "Parameter", nullptr},
      {"torch.nn", "Parameter", nullptr},
      {"torch", "Size", size, Rule::kNoState, true},
      {"torch", "device", device, Rule::kNoState, true},
      {"torch", "Generator", generator, Rule::kOwnState},
      {"torch._C", "Generator", generator, Rule::kOwnState},
      {"numpy", "ndarray", nullptr},
      {"numpy", "dtype", dtype, Rule::kOwnState, true},
  };
  for (const std::string_view core : {"numpy.core.multiarray", "numpy._core.multiarray"}) {
    rules.push_back({core, "_reconstruct", empty_array, Rule::kOwnState});
    rules.push_back({core, "scalar", scalar, Rule::kNoState, true});
  }
  for (const std::string_view core : {"numpy.core.numeric", "numpy._core.numeric"})
    rules.push_back({core, "_frombuffer", from_buffer});
  return rules;
}

}  // namespace ds::formats
