#include "formats/graph_builder.h"

#include <algorithm>

#include "base/ranges.h"
#include "base/sizes.h"
#include "formats/format_error.h"
#include "formats/pickle_names.h"

namespace ds::formats {
namespace {

constexpr size_t kKeyNodes = 4096;  // a key is hashed: nested tuples that share parts would take exponential time
constexpr int kKeyDepth = 64;
constexpr int kMostUnguarded = 4096;  // freed one inside the other: deeper ones would end the interpreter's stack
// Rules copy what they are given, again and again if the file says so. Honest files have each thing copied once.
constexpr uint64_t kMostCopies = 16;
constexpr int64_t kMostExpandedNumel = 1 << 28;  // strides of 0: a few bytes must not ask for a terabyte
constexpr int kSmallest = -5, kLargest = 256;    // numbers that are there from the start
constexpr Ref kNumbers = 3;

bool ends_with_underscores(std::string_view name) {
  return name.size() >= 4 && name.substr(0, 2) == "__" && name.substr(name.size() - 2) == "__";
}

}  // namespace

void need(bool condition, const char* what) {
  if (!condition) throw Complaint(what);
}

GraphBuilder::GraphBuilder(uint64_t bytes, std::function<void(const StoredMemory&)> check_storage)
    : check_storage_(std::move(check_storage)), copies_left_(kMostCopies * bytes + (1 << 20)) {
  add({});
  for (int value = 0; value < 2; ++value) {
    Node node;
    node.kind = Kind::kBool;
    node.number = value;
    add(node);
  }
  for (int value = kSmallest; value <= kLargest; ++value) {
    Node node;
    node.kind = Kind::kInt;
    node.number = value;
    add(node);
  }
}

Ref GraphBuilder::add(Node node) {
  need(graph_.nodes.size() < kNoRef - 1, "more objects than any checkpoint has");
  node.at = at_;
  graph_.nodes.push_back(node);
  return static_cast<Ref>(graph_.nodes.size() - 1);
}

Ref GraphBuilder::integer(int64_t value) {
  if (value >= kSmallest && value <= kLargest) return kNumbers + static_cast<Ref>(value - kSmallest);
  Node node;
  node.kind = Kind::kInt;
  node.number = value;
  return add(node);
}

Ref GraphBuilder::real(double value) {
  Node node;
  node.kind = Kind::kFloat;
  node.real = value;
  return add(node);
}

Ref GraphBuilder::text(Kind kind, std::string_view bytes) {
  Node node;
  node.kind = kind;
  node.index = static_cast<uint32_t>(graph_.texts.size());
  graph_.texts.push_back(bytes);
  return add(node);
}

Ref GraphBuilder::owned_text(Kind kind, std::string bytes) {
  graph_.owned.push_back(std::move(bytes));
  return text(kind, graph_.owned.back());
}

Ref GraphBuilder::list(std::vector<Ref> items) {
  Node node;
  node.kind = Kind::kList;
  node.index = static_cast<uint32_t>(graph_.contents.size());
  graph_.contents.emplace_back();
  const Ref made = add(node);
  if (!items.empty()) extend(made, items.data(), items.size());
  return made;
}

Ref GraphBuilder::set(std::vector<Ref> items) {
  Node node;
  node.kind = Kind::kSet;
  node.index = static_cast<uint32_t>(graph_.contents.size());
  graph_.contents.emplace_back();
  const Ref made = add(node);
  if (!items.empty()) add_items(made, items.data(), items.size());
  return made;
}

Ref GraphBuilder::dict(const std::vector<Ref>& pairs) {
  Node node;
  node.kind = Kind::kDict;
  node.index = static_cast<uint32_t>(graph_.contents.size());
  graph_.contents.emplace_back();
  const Ref made = add(node);
  if (!pairs.empty()) set_items(made, pairs.data(), pairs.size());
  return made;
}

Ref GraphBuilder::tuple(const Ref* items, size_t count, Kind kind) {
  if (kind == Kind::kFrozenSet) {
    for (size_t i = 0; i < count; ++i) check_key(items[i]);
  }
  Node node;
  node.kind = kind;
  node.begin = static_cast<uint32_t>(graph_.parts.size());
  node.count = static_cast<uint32_t>(count);
  need(graph_.parts.size() + count < kNoRef, "more objects than any checkpoint has");
  const std::vector<Ref> kept(items, items + count);  // they may lie in `parts`
  append(graph_.parts, kept);
  return add(node);
}

Ref GraphBuilder::global(Global found) {
  Node node;
  node.kind = Kind::kGlobal;
  node.index = static_cast<uint32_t>(graph_.globals.size());
  graph_.globals.push_back(std::move(found));
  return add(node);
}

Ref GraphBuilder::object(Call call, Ref global, const Ref* arguments, size_t count, bool with_contents) {
  std::vector<Ref> parts{global};
  parts.insert(parts.end(), arguments, arguments + count);
  need(graph_.parts.size() + parts.size() < kNoRef, "more objects than any checkpoint has");
  Node node;
  node.kind = Kind::kObject;
  node.call = call;
  node.begin = static_cast<uint32_t>(graph_.parts.size());
  node.count = static_cast<uint32_t>(parts.size());
  node.index = kNoRef;
  if (with_contents) {
    node.index = static_cast<uint32_t>(graph_.contents.size());
    graph_.contents.emplace_back();
  }
  append(graph_.parts, parts);
  return add(node);
}

Ref GraphBuilder::storage(StoredMemory memory) {
  const auto known = storages_.find(memory.key);
  if (known == storages_.end()) {
    check_storage_(memory);
    storages_.emplace(memory.key, static_cast<uint32_t>(graph_.storages.size()));
    graph_.storages.push_back(memory);
  } else {
    const StoredMemory& before = graph_.storages[known->second];
    if (before.element != memory.element || before.numel != memory.numel) {
      throw Complaint("the storage '" + memory.key + "' is of two kinds");
    }
  }
  Node node;
  node.kind = Kind::kStorage;
  node.index = storages_.at(memory.key);
  return add(node);
}

Ref GraphBuilder::tensor(StoredTensor tensor) {
  const StoredMemory& memory = graph_.storages[tensor.storage];
  int64_t held = 0;
  need(sizes::multiply<int64_t>(memory.numel, memory.element->bytes, &held), "a storage of this size");
  held /= tensor.element->bytes;
  need(tensor.offset >= 0 && tensor.shape.size() == tensor.stride.size(), "a tensor of another shape than its strides");
  // 128 bits hold any product of two numbers of 64; sums stop as soon as they are too large.
  __int128 numel = 1, end = tensor.offset;
  for (size_t i = 0; i < tensor.shape.size(); ++i) {
    need(tensor.shape[i] >= 0 && tensor.stride[i] >= 0, "a tensor of a negative size or stride");
    if (tensor.shape[i] == 0) numel = 0;
  }
  for (size_t i = 0; numel != 0 && i < tensor.shape.size(); ++i) {
    numel *= tensor.shape[i];
    end += static_cast<__int128>(tensor.shape[i] - 1) * tensor.stride[i];
    need(numel <= std::max(held, kMostExpandedNumel) && end <= held, "a tensor lies outside of its storage");
  }
  need(end + (numel != 0 ? 1 : 0) <= held, "a tensor lies outside of its storage");
  Node node;
  node.kind = Kind::kTensor;
  node.index = static_cast<uint32_t>(graph_.tensors.size());
  graph_.tensors.push_back(std::move(tensor));
  return add(node);
}

// ---- steps
// -----------------------------------------------------------------------------------------------------------
void GraphBuilder::step(Step::Op op, Ref target, const Ref* items, size_t count) {
  need(graph_.parts.size() + count < kNoRef, "more objects than any checkpoint has");
  Step made;
  made.op = op;
  made.target = target;
  made.nodes = static_cast<uint32_t>(graph_.nodes.size());
  made.begin = static_cast<uint32_t>(graph_.parts.size());
  made.count = static_cast<uint32_t>(count);
  made.at = at_;
  graph_.parts.insert(graph_.parts.end(), items, items + count);
  graph_.steps.push_back(made);
  if (op != Step::kBuild && has_contents(target)) {
    std::vector<Ref>& held = graph_.contents[node(target).index];
    held.insert(held.end(), items, items + count);
  }
}

bool GraphBuilder::has_contents(Ref ref) const {
  const Node& found = node(ref);
  return found.kind == Kind::kList || found.kind == Kind::kDict || found.kind == Kind::kSet ||
         (found.kind == Kind::kObject && found.index != kNoRef);
}

const Ref* GraphBuilder::items_of(Ref ref, size_t* count) const {
  if (has_contents(ref)) {
    const std::vector<Ref>& held = graph_.contents[node(ref).index];
    *count = held.size();
    return held.data();
  }
  const Node& found = node(ref);
  need(found.kind == Kind::kTuple || found.kind == Kind::kFrozenSet, "items of something else");
  *count = found.count;
  return graph_.parts.data() + found.begin;
}

void GraphBuilder::extend(Ref target, const Ref* items, size_t count) {
  // The code that makes objects of other classes knows whether they can hold items.
  if (!is(target, Kind::kList) && !(is(target, Kind::kObject) && (is_object_of(target, "collections", "deque") ||
                                                                  class_of(target).use == NameUse::kPlain ||
                                                                  class_of(target).use == NameUse::kTrusted))) {
    throw Complaint("items for a " + type_name(target));
  }
  step(Step::kExtend, target, items, count);
}

void GraphBuilder::set_items(Ref target, const Ref* pairs, size_t count) {
  need(count % 2 == 0, "a key without a value");
  if (!is(target, Kind::kDict) &&
      !(is(target, Kind::kObject) && (has_contents(target) || class_of(target).use == NameUse::kPlain ||
                                      class_of(target).use == NameUse::kTrusted))) {
    throw Complaint("keys for a " + type_name(target));
  }
  for (size_t i = 0; i < count; i += 2) check_key(pairs[i]);
  step(Step::kSetItems, target, pairs, count);
}

void GraphBuilder::add_items(Ref target, const Ref* items, size_t count) {
  if (!is(target, Kind::kSet) && !(is(target, Kind::kObject) && class_of(target).use == NameUse::kPlain)) {
    throw Complaint("members for a " + type_name(target));
  }
  for (size_t i = 0; i < count; ++i) check_key(items[i]);
  step(Step::kAddItems, target, items, count);
}

void GraphBuilder::check_attributes(Ref state) {
  if (is(state, Kind::kNone)) return;
  need(is(state, Kind::kDict), "a state that is not a dict");
  size_t count;
  const Ref* items = items_of(state, &count);
  for (size_t i = 0; i < count; i += 2) {
    need(is(items[i], Kind::kText) && !ends_with_underscores(text_of(items[i])), "an attribute that no object has");
  }
}

void GraphBuilder::build(Ref target, Ref state) {
  if (is(state, Kind::kTuple)) {
    count_copies(graph_.parts_of(state), node(state).count);
  } else {
    count_copies(&state, 1);
  }
  const bool object = is(target, Kind::kObject);
  const NameUse use = object ? class_of(target).use : NameUse::kValue;
  if (use == NameUse::kTrusted) return step(Step::kBuild, target, &state, 1);
  const Rule::State rule = use == NameUse::kRule ? rule_at(class_of(target).rule).state : Rule::kNoState;
  if (rule == Rule::kOwnState) return step(Step::kBuild, target, &state, 1);
  if (!(rule == Rule::kAttributes || (use == NameUse::kPlain && !class_of(target).is_enum))) {
    throw RefusedName(type_name(target));
  }
  if (is(state, Kind::kTuple) && node(state).count == 2) {
    const Ref attributes = graph_.parts_of(state)[0], slots = graph_.parts_of(state)[1];
    check_attributes(attributes);
    check_attributes(slots);
  } else {
    check_attributes(state);
  }
  step(Step::kBuild, target, &state, 1);
}

// ---- calls
// -----------------------------------------------------------------------------------------------------------
Ref GraphBuilder::call(Call call, Ref function, const Ref* arguments, size_t count) {
  count_copies(arguments, count);
  if (!is(function, Kind::kGlobal)) throw RefusedName(type_name(function));
  const Global& found = global_of(function);
  if (found.use == NameUse::kTrusted) return object(call, function, arguments, count);
  if (call == Call::kNewWithKeywords) {
    size_t keywords = 0;
    if (is(arguments[count - 1], Kind::kDict)) items_of(arguments[count - 1], &keywords);
    need(keywords == 0, "arguments by keyword");
    call = Call::kNew;
    --count;
  }
  if (found.use == NameUse::kPlain) {
    if (found.unguarded) count_unguarded();
    need(!found.is_enum || count == 1, "an enum of several values");
    return object(call, function, arguments, count);
  }
  if (found.use != NameUse::kRule || rule_at(found.rule).call == nullptr) throw RefusedName(found.full());
  const std::vector<Ref> kept(arguments, arguments + count);  // they may lie in the graph, which grows
  return rule_at(found.rule).call(*this, function, kept.data(), count);
}

void GraphBuilder::count_copies(const Ref* arguments, size_t count) {
  uint64_t sum = 0;
  for (size_t i = 0; i < count; ++i) {
    const Node& argument = node(arguments[i]);
    switch (argument.kind) {
      case Kind::kText:
      case Kind::kBytes:
      case Kind::kByteArray: sum += graph_.texts[argument.index].size(); break;
      case Kind::kTuple:
      case Kind::kFrozenSet: sum += argument.count; break;
      default:
        if (has_contents(arguments[i])) sum += graph_.contents[argument.index].size();
    }
  }
  need(sum <= copies_left_, "copies of copies");
  copies_left_ -= sum;
}

void GraphBuilder::count_unguarded() { need(++unguarded_ <= kMostUnguarded, "more than 4096 deques and defaultdicts"); }

void GraphBuilder::check_key(Ref key) const {
  size_t nodes = 0;
  std::vector<Ref> level{key}, following;
  for (int depth = 0; depth < kKeyDepth; ++depth) {
    following.clear();
    for (const Ref ref : level) {
      const Node& item = node(ref);
      bool cheap = false;
      switch (item.kind) {
        case Kind::kTuple:
        case Kind::kFrozenSet:
          nodes += item.count;
          need(nodes <= kKeyNodes, "a key of too many parts");
          following.insert(following.end(), graph_.parts_of(ref), graph_.parts_of(ref) + item.count);
          cheap = true;
          break;
        case Kind::kList:
        case Kind::kDict:
        case Kind::kSet:
        case Kind::kByteArray: throw Complaint("unhashable type: '" + type_name(ref).substr(9) + "'");
        case Kind::kTensor:
        case Kind::kStorage: break;
        case Kind::kObject: {
          const Global& made = class_of(ref);
          cheap = made.use == NameUse::kRule ? rule_at(made.rule).cheap_key : made.cheap_key || made.is_enum;
          if (cheap && made.use != NameUse::kRule && !made.is_enum) {  // a named tuple, perhaps: it hashes its parts
            nodes += item.count;
            need(nodes <= kKeyNodes, "a key of too many parts");
            following.insert(following.end(), graph_.parts_of(ref) + 1, graph_.parts_of(ref) + item.count);
          }
          break;
        }
        default: cheap = true;
      }
      if (!cheap) throw Complaint("a key of type " + type_name(ref));
    }
    if (following.empty()) return;
    level.swap(following);
  }
  throw Complaint("a key that is nested too deeply");
}

// ---- names
// -----------------------------------------------------------------------------------------------------------
bool GraphBuilder::is_global(Ref ref, std::string_view module, std::string_view name) const {
  return is(ref, Kind::kGlobal) && global_of(ref).module == module && global_of(ref).name == name;
}

bool GraphBuilder::is_object_of(Ref ref, std::string_view module, std::string_view name) const {
  return is(ref, Kind::kObject) && class_of(ref).module == module && class_of(ref).name == name;
}

std::string GraphBuilder::type_name(Ref ref) const {
  switch (node(ref).kind) {
    case Kind::kNone: return "builtins.NoneType";
    case Kind::kBool: return "builtins.bool";
    case Kind::kInt:
    case Kind::kBigInt:
    case Kind::kDecimal: return "builtins.int";
    case Kind::kFloat: return "builtins.float";
    case Kind::kText: return "builtins.str";
    case Kind::kBytes: return "builtins.bytes";
    case Kind::kByteArray: return "builtins.bytearray";
    case Kind::kTuple: return "builtins.tuple";
    case Kind::kFrozenSet: return "builtins.frozenset";
    case Kind::kList: return "builtins.list";
    case Kind::kDict: return "builtins.dict";
    case Kind::kSet: return "builtins.set";
    case Kind::kGlobal: return global_of(ref).full();
    case Kind::kObject: return class_of(ref).full();
    case Kind::kTensor: return "torch.Tensor";
    case Kind::kStorage: return "torch.storage.TypedStorage";
  }
  return "an object";
}

}  // namespace ds::formats
