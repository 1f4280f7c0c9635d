// The content of a pickle as plain data: nodes, and the steps that fill them, in the order of the file.
//
// A node refers to earlier nodes only, so whoever makes real objects of it walks both lists once, without recursion:
// make the nodes up to `Step::nodes`, do the step, go on. A list that contains itself is a node and a later step.
#pragma once
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "formats/element.h"

namespace ds::formats {

using Ref = uint32_t;
constexpr Ref kNoRef = ~Ref{0};

enum class Kind : uint8_t {
  kNone,
  kBool,       // number
  kInt,        // number
  kBigInt,     // text: two's complement, little endian
  kDecimal,    // text: digits of an int that has more than 64 bits
  kFloat,      // real
  kText,       // text: UTF-8, lone surrogates as three bytes
  kBytes,      // text
  kByteArray,  // text
  kTuple,      // parts
  kFrozenSet,  // parts
  kList,       // contents
  kDict,       // contents: key, value, key, value
  kSet,        // contents
  kGlobal,     // index into PickleGraph::globals
  kObject,     // parts: the global that is called, its arguments; contents
  kTensor,     // index into PickleGraph::tensors
  kStorage,    // index into PickleGraph::storages
};

enum class Call : uint8_t { kReduce, kNew, kNewWithKeywords };  // the last part of the last one is a dict

struct Node {
  Kind kind = Kind::kNone;
  Call call = Call::kReduce;
  uint32_t begin = 0, count = 0;  // of parts in PickleGraph::parts
  uint32_t index = 0;             // of globals, tensors, storages, texts, contents
  union {
    int64_t number = 0;
    double real;
  };
  uint64_t at = 0;  // the byte of the pickle behind it
};

// The permitted use of a name in a file.
enum class NameUse : uint8_t {
  kValue,    // nothing is done with it: a dtype, a class without instances
  kRule,     // may be called as the table of this library says (pickle_names.h); `rule` is its row
  kStorage,  // a class of storages; `element`
  kPlain,    // a class of the process that is data and nothing else
  kTrusted,  // the caller lets it do as it pleases
};

struct Global {
  std::string module, name;
  NameUse use = NameUse::kValue;
  uint16_t rule = 0;
  const Element* element = nullptr;
  // The rest is set for kPlain and kTrusted, by the resolver.
  uint32_t token = 0;      // by which the resolver finds it again
  bool is_enum = false;    // its call gives a member
  bool cheap_key = false;  // instances are hashed and compared without their own code
  bool unguarded = false;  // a deque or defaultdict: freed recursively
  std::string full() const { return module + "." + name; }
};

struct StoredTensor {
  uint32_t storage = 0;
  const Element* element = nullptr;
  int64_t offset = 0;  // elements
  std::vector<int64_t> shape, stride;
  bool requires_grad = false;
};

struct StoredMemory {
  std::string key;
  const Element* element = nullptr;
  int64_t numel = 0;
};

struct Step {
  enum Op : uint8_t { kExtend, kSetItems, kAddItems, kBuild } op;
  Ref target;
  uint32_t nodes;         // how many there are before it
  uint32_t begin, count;  // parts; for kBuild one, the state
  uint64_t at;            // the byte of the pickle behind it
};

struct PickleGraph {
  std::vector<Node> nodes;
  std::vector<Step> steps;
  std::vector<Ref> parts;
  std::vector<std::vector<Ref>> contents;  // of lists, dicts, sets and mappings, at the end
  std::vector<std::string_view> texts;     // into the file's bytes, or into `owned`
  std::deque<std::string> owned;
  std::vector<Global> globals;
  std::vector<StoredTensor> tensors;
  std::vector<StoredMemory> storages;
  Ref root = kNoRef;

  std::string_view text(Ref ref) const { return texts[nodes[ref].index]; }
  const Ref* parts_of(Ref ref) const { return parts.data() + nodes[ref].begin; }
  bool is(Ref ref, Kind kind) const { return nodes[ref].kind == kind; }
};

}  // namespace ds::formats
