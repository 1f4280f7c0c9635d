// Adds nodes and steps to a graph, and keeps the bounds on what a short file can ask for.
#pragma once
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "formats/pickle_graph.h"

namespace ds::formats {

// Something in a pickle that must not be; the machine adds where.
class Complaint : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

void need(bool condition, const char* what);  // Complaint unless it holds

class GraphBuilder {
 public:
  // `check_storage` throws when the file does not hold such a storage.
  GraphBuilder(uint64_t bytes, std::function<void(const StoredMemory&)> check_storage);

  const PickleGraph& graph() const { return graph_; }
  PickleGraph take() { return std::move(graph_); }
  void at(uint64_t byte) { at_ = byte; }

  Ref none() const { return 0; }
  Ref boolean(bool value) const { return value ? 2 : 1; }
  Ref integer(int64_t value);
  Ref real(double value);
  Ref text(Kind kind, std::string_view bytes);  // bytes of the file
  Ref owned_text(Kind kind, std::string bytes);
  Ref list(std::vector<Ref> items);  // with its items, checked where they are keys
  Ref set(std::vector<Ref> items);
  Ref dict(const std::vector<Ref>& pairs);
  Ref tuple(const Ref* items, size_t count, Kind kind = Kind::kTuple);
  Ref global(Global found);
  Ref object(Call call, Ref global, const Ref* arguments, size_t count, bool with_contents = false);
  Ref tensor(StoredTensor tensor);  // Complaint when it is outside of its storage
  Ref storage(StoredMemory memory);

  void extend(Ref target, const Ref* items, size_t count);
  void set_items(Ref target, const Ref* pairs, size_t count);
  void add_items(Ref target, const Ref* items, size_t count);
  void build(Ref target, Ref state);

  // REDUCE, NEWOBJ: what the global may do with them. RefusedName for what is not to be called.
  Ref call(Call call, Ref function, const Ref* arguments, size_t count);

  const Node& node(Ref ref) const { return graph_.nodes[ref]; }
  bool is(Ref ref, Kind kind) const { return graph_.nodes[ref].kind == kind; }
  bool is_integer(Ref ref) const { return is(ref, Kind::kInt) || is(ref, Kind::kBigInt) || is(ref, Kind::kDecimal); }
  std::string_view text_of(Ref ref) const { return graph_.text(ref); }
  const Global& global_of(Ref ref) const { return graph_.globals[node(ref).index]; }  // of kGlobal
  const Global& class_of(Ref object) const { return global_of(graph_.parts[node(object).begin]); }
  bool is_object_of(Ref ref, std::string_view module, std::string_view name) const;
  bool is_global(Ref ref, std::string_view module, std::string_view name) const;
  bool has_contents(Ref ref) const;
  // Items of a list, tuple or set; keys and values of a dict or mapping. They move when nodes are added.
  const Ref* items_of(Ref ref, size_t* count) const;
  // Complaint unless hashing and comparing it is cheap and runs no code of the file.
  void check_key(Ref key) const;
  void count_unguarded();
  std::string type_name(Ref ref) const;  // "builtins.list"

 private:
  Ref add(Node node);
  void step(Step::Op op, Ref target, const Ref* items, size_t count);
  void count_copies(const Ref* arguments, size_t count);
  void check_attributes(Ref state);

  PickleGraph graph_;
  std::function<void(const StoredMemory&)> check_storage_;
  std::unordered_map<std::string, uint32_t> storages_;  // by key
  uint64_t at_ = 0;
  uint64_t copies_left_;
  int unguarded_ = 0;
};

}  // namespace ds::formats
