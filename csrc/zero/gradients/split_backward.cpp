#include "zero/gradients/split_backward.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/ranges.h"
#include "comm/c10d_compat.h"
#include "zero/torch_compat.h"

namespace ds::zero {

namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;
using comm::compat::NodePtr;
using Leaves = std::unordered_set<Node*>;

// Keeps the gradients that came into a boundary, as a hook of it.
class KeepingHook : public torch::autograd::FunctionPreHook {
 public:
  explicit KeepingHook(std::shared_ptr<variable_list> kept) : kept_(std::move(kept)) {}
  variable_list operator()(const variable_list& grads) override {
    *kept_ = grads;
    return grads;
  }

 private:
  std::shared_ptr<variable_list> kept_;
};

struct Reach {
  bool input = false, weight = false;
};

bool is_leaf(const Node* node) { return dynamic_cast<const torch::autograd::AccumulateGrad*>(node) != nullptr; }

// Computes each of its results by itself, and only those that are asked for.
bool is_divisible(Node* node) {
  return std::strstr(typeid(*node).name(), "autograd9generated") != nullptr && !compat::has_pre_hooks(*node) &&
         node->post_hooks().empty();
}

// A re-entrant checkpoint, which autograd allows in a backward to all leaves only.
bool recomputes(const Node& node) { return node.name().find("Checkpoint") != std::string::npos; }

// The graph behind some nodes: what each leads to. Ends before starts, so a node comes after all it leads to.
class Graph {
 public:
  Graph(const edge_list& roots, const Leaves& inputs) {
    for (const Edge& root : roots) visit(root.function);
    for (const NodePtr& node : order_) {
      Reach& reach = reaches_[node.get()];
      if (is_leaf(node.get())) {
        (inputs.count(node.get()) ? reach.input : reach.weight) = true;
        continue;
      }
      for (const Edge& edge : node->next_edges()) {
        if (!edge.is_valid()) continue;
        const Reach& next = reaches_.at(edge.function.get());
        reach.input = reach.input || next.input;
        reach.weight = reach.weight || next.weight;
      }
    }
  }

  const std::vector<NodePtr>& nodes() const { return order_; }
  bool to_input(const Node* node) const { return reaches_.at(node).input; }
  bool to_weights_alone(const Node* node) const { return reaches_.at(node).weight && !reaches_.at(node).input; }
  bool is_boundary(Node* node) const {
    if (!to_input(node)) return false;
    const auto& edges = node->next_edges();
    return any_of(edges, [this](const Edge& edge) { return edge.is_valid() && to_weights_alone(edge.function.get()); });
  }

  // Leaves below the edges of `node` that lead to weights alone; below the node itself where it does so.
  Leaves weights_of(Node* node) const {
    Leaves found, seen;
    std::vector<Node*> open;
    const auto add = [&](Node* next) {
      if (to_weights_alone(next) && seen.insert(next).second) open.push_back(next);
    };
    if (to_input(node)) {
      for (const Edge& edge : node->next_edges())
        if (edge.is_valid()) add(edge.function.get());
    } else {
      add(node);
    }
    while (!open.empty()) {
      Node* const at = open.back();
      open.pop_back();
      if (is_leaf(at)) found.insert(at);
      for (const Edge& edge : at->next_edges())
        if (edge.is_valid()) add(edge.function.get());
    }
    return found;
  }

 private:
  void visit(const NodePtr& root) {
    if (!root || !seen_.insert(root.get()).second) return;
    std::vector<std::pair<NodePtr, size_t>> open{{root, 0}};
    while (!open.empty()) {
      auto& [node, next] = open.back();
      if (next == node->next_edges().size()) {
        order_.push_back(node);
        open.pop_back();
        continue;
      }
      const Edge edge = node->next_edges()[next++];
      if (edge.is_valid() && seen_.insert(edge.function.get()).second) open.emplace_back(edge.function, 0);
    }
  }

  std::vector<NodePtr> order_;
  std::unordered_set<Node*> seen_;
  std::unordered_map<const Node*, Reach> reaches_;
};

// Weights that get their gradients with the inputs: below nodes that run once only.
Leaves early_weights(const Graph& graph) {
  Leaves early;
  std::vector<Leaves> together;  // of nodes that lead to weights alone and run once: all or none
  for (const NodePtr& node : graph.nodes()) {
    if (is_leaf(node.get()) || is_divisible(node.get())) continue;
    if (graph.is_boundary(node.get())) {
      early.merge(graph.weights_of(node.get()));
    } else if (graph.to_weights_alone(node.get())) {
      together.push_back(graph.weights_of(node.get()));
    }
  }
  for (bool grew = !early.empty(); grew;) {
    grew = false;
    for (const Leaves& leaves : together) {
      const auto in = static_cast<size_t>(
          std::count_if(leaves.begin(), leaves.end(), [&](Node* leaf) { return early.count(leaf) > 0; }));
      if (in == 0 || in == leaves.size()) continue;
      early.insert(leaves.begin(), leaves.end());
      grew = true;
    }
  }
  return early;
}

void run(const edge_list& roots, const variable_list& grads, bool keep, const edge_list& targets) {
  if (!roots.empty())
    torch::autograd::Engine::get_default_engine().execute(roots, grads, keep, /*create_graph=*/false,
                                                          /*accumulate_grad=*/true, targets);
}

}  // namespace

struct SplitBackward::Halves {
  struct Boundary {
    NodePtr node;
    std::shared_ptr<variable_list> grads = std::make_shared<variable_list>();
  };

  edge_list roots, first, later;  // of the backward; leaves of each half
  variable_list grads;
  std::vector<Boundary> boundaries;
  edge_list weight_roots;  // roots that lead to weights alone
  variable_list weight_grads;
  Leaves to_input;           // nodes behind cut edges
  bool whole = false;        // all of it at once: in the second half,
  bool whole_first = false;  // or in the first
};

SplitBackward::SplitBackward(const std::vector<at::Tensor>& outputs, std::vector<at::Tensor> grads,
                             const std::vector<at::Tensor>& inputs)
    : halves_(std::make_unique<Halves>()) {
  Halves& halves = *halves_;
  for (const at::Tensor& output : outputs) halves.roots.push_back(torch::autograd::impl::gradient_edge(output));
  halves.grads = std::move(grads);
  Leaves leaves;
  for (const at::Tensor& input : inputs)
    if (input.requires_grad()) leaves.insert(torch::autograd::impl::gradient_edge(input).function.get());
  const Graph graph(halves.roots, leaves);
  for (const NodePtr& node : graph.nodes())
    if (leaves.count(node.get())) halves.first.emplace_back(node, 0);
  halves.whole = halves.first.empty();  // no part waits for it
  if (halves.whole) return;
  const auto& nodes = graph.nodes();
  halves.whole_first = any_of(nodes, [](const NodePtr& node) { return recomputes(*node); });
  if (halves.whole_first) return;

  const Leaves early = early_weights(graph);
  for (const NodePtr& node : graph.nodes()) {
    if (!is_leaf(node.get()) || leaves.count(node.get())) continue;
    (early.count(node.get()) ? halves.first : halves.later).emplace_back(node, 0);
  }
  if (halves.later.empty()) return;
  for (const NodePtr& node : graph.nodes()) {
    if (graph.to_input(node.get())) halves.to_input.insert(node.get());
    if (!graph.is_boundary(node.get()) || !is_divisible(node.get())) continue;
    Halves::Boundary boundary{node};
    node->add_pre_hook(std::make_unique<KeepingHook>(boundary.grads));
    halves.boundaries.push_back(std::move(boundary));
  }
  for (size_t root = 0; root < halves.roots.size(); ++root) {
    if (!graph.to_weights_alone(halves.roots[root].function.get())) continue;
    halves.weight_roots.push_back(halves.roots[root]);
    halves.weight_grads.push_back(halves.grads[root]);
  }
}

SplitBackward::~SplitBackward() = default;

bool SplitBackward::nothing_left() const { return !halves_->whole && halves_->later.empty(); }

void SplitBackward::run_inputs() {
  if (halves_->whole) return;
  if (halves_->whole_first) return run(halves_->roots, halves_->grads, false, {});
  run(halves_->roots, halves_->grads, /*keep=*/!halves_->later.empty(), halves_->first);
}

void SplitBackward::run_weights() {
  const std::unique_ptr<Halves> halves = std::exchange(halves_, std::make_unique<Halves>());
  if (halves->whole) return run(halves->roots, halves->grads, false, {});
  if (halves->later.empty()) return;
  edge_list roots = halves->weight_roots;
  variable_list grads = halves->weight_grads;
  for (Halves::Boundary& boundary : halves->boundaries) {
    boundary.node->pre_hooks().clear();  // ours alone: a node with others is no boundary
    // set_next_edge() refuses nodes that others lead to: it cannot know that nothing runs through them any more.
    for (Edge& edge : const_cast<edge_list&>(boundary.node->next_edges()))
      if (edge.is_valid() && halves->to_input.count(edge.function.get())) edge = Edge();
    for (size_t index = 0; index < boundary.grads->size(); ++index) {
      if (!(*boundary.grads)[index].defined()) continue;
      roots.emplace_back(boundary.node, static_cast<uint32_t>(index));
      grads.push_back((*boundary.grads)[index]);
    }
  }
  run(roots, grads, false, halves->later);
}

}  // namespace ds::zero
