#include "graphs.h"

#include <c10/util/Exception.h>

#include <atomic>

namespace standin {

namespace {

std::atomic<Graph*> recorded{nullptr};

}  // namespace

void Graph::add(std::string name, std::vector<Access> accesses, const std::vector<at::Tensor>& kept,
                std::function<void()> run) {
  steps_.push_back({std::move(name), std::move(accesses), std::move(run)});
  kept_.insert(kept_.end(), kept.begin(), kept.end());
}

void Graph::replay(Stream& stream) const {
  for (const Step& step : steps_) submit(stream, step.name, step.accesses, step.run);
}

Graph* recording() { return recorded; }

void record_into(Graph* graph) {
  TORCH_CHECK(!graph || !recorded, "another graph is being recorded");
  recorded = graph;
}

void refuse_while_recording(const std::string& what) {
  TORCH_CHECK(!recorded, what, " needs a value now, and a graph is being recorded: move it out of the context");
}

}  // namespace standin

#define DS_VISIBLE __attribute__((visibility("default")))

extern "C" {

DS_VISIBLE void* standin_graph_begin() {
  auto* graph = new standin::Graph;
  standin::record_into(graph);
  return graph;
}

DS_VISIBLE void standin_graph_end() { standin::record_into(nullptr); }

DS_VISIBLE int standin_graph_recording() { return standin::recording() != nullptr ? 1 : 0; }

DS_VISIBLE void standin_graph_replay(void* graph) {
  static_cast<standin::Graph*>(graph)->replay(standin::current_stream(standin::current_device()));
}

DS_VISIBLE void standin_graph_free(void* graph) { delete static_cast<standin::Graph*>(graph); }

}  // extern "C"
