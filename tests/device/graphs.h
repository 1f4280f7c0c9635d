// Graphs: operations that are recorded instead of queued, and that each replay queues again.
#pragma once
#include <ATen/core/Tensor.h>

#include "streams.h"

namespace standin {

class Graph {
 public:
  // `kept`: tensors that the operation uses; their memory lives as long as the graph.
  void add(std::string name, std::vector<Access> accesses, const std::vector<at::Tensor>& kept,
           std::function<void()> run);
  void replay(Stream& stream) const;

 private:
  struct Step {
    std::string name;
    std::vector<Access> accesses;
    std::function<void()> run;
  };
  std::vector<Step> steps_;
  std::vector<at::Tensor> kept_;
};

// The graph into which operations of all threads go, as those of backward run in others; null: they are queued.
Graph* recording();
void record_into(Graph* graph);
// Throws where a graph is recorded: `what` needs a value, or memory of the host, now.
void refuse_while_recording(const std::string& what);

}  // namespace standin
