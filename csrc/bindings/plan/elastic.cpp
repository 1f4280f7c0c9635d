// deepspeed._C.elastic: batch sizes for many numbers of ranks, csrc/plan/elastic_plan.h.
#include <pybind11/stl.h>

#include "bindings/registry.h"
#include "plan/elastic_plan.h"

namespace py = pybind11;

DS_BINDINGS(m) {
  using namespace ds::plan;
  auto elastic = m.def_submodule("elastic", "Batch sizes that many numbers of ranks can share.");
  py::class_<ElasticRequest>(elastic, "Request")
      .def(py::init([](int64_t max_batch, std::vector<int64_t> micros, int64_t min_ranks, int64_t max_ranks,
                       bool prefer_larger) {
             return ElasticRequest{max_batch, std::move(micros), min_ranks, max_ranks, prefer_larger};
           }),
           "max_batch"_a, "micros"_a, "min_ranks"_a, "max_ranks"_a, "prefer_larger"_a);
  elastic.def("worlds", &elastic_worlds, "batch"_a, "micros"_a, "low"_a, "high"_a);
  elastic.def("micro", &elastic_micro, "batch"_a, "ranks"_a, "micros"_a, "larger"_a);
  elastic.def(
      "plan",
      [](const ElasticRequest& request) {
        const ElasticPlan plan = elastic_plan(request);
        return py::make_tuple(plan.batch, plan.worlds);
      },
      "request"_a);
  elastic.def(
      "node_worlds",
      [](const ElasticRequest& request, int64_t ranks_per_node, int64_t model_parallel) {
        return elastic_nodes(request, {ranks_per_node, model_parallel}).worlds;
      },
      "request"_a, "ranks_per_node"_a, "model_parallel"_a);
  elastic.def(
      "node_plan",
      [](const ElasticRequest& request, int64_t ranks_per_node, int64_t model_parallel, int64_t ranks) {
        const ElasticNodePlan plan = elastic_node_plan(request, {ranks_per_node, model_parallel}, ranks);
        return py::make_tuple(plan.batch, plan.worlds, plan.micro, plan.listed);
      },
      "request"_a, "ranks_per_node"_a, "model_parallel"_a, "ranks"_a);
}
