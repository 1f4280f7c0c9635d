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
           py::arg("max_batch"), py::arg("micros"), py::arg("min_ranks"), py::arg("max_ranks"),
           py::arg("prefer_larger"));
  elastic.def("highly_composite", &highly_composite, py::arg("limit"));
  elastic.def("worlds", &elastic_worlds, py::arg("batch"), py::arg("micros"), py::arg("low"), py::arg("high"));
  elastic.def("micro", &elastic_micro, py::arg("batch"), py::arg("ranks"), py::arg("micros"), py::arg("larger"));
  elastic.def(
      "plan",
      [](const ElasticRequest& request) {
        const ElasticPlan plan = elastic_plan(request);
        return py::make_tuple(plan.batch, plan.worlds);
      },
      py::arg("request"));
  elastic.def(
      "node_worlds",
      [](const ElasticRequest& request, int64_t ranks_per_node, int64_t model_parallel) {
        return elastic_nodes(request, {ranks_per_node, model_parallel}).worlds;
      },
      py::arg("request"), py::arg("ranks_per_node"), py::arg("model_parallel"));
  elastic.def(
      "node_plan",
      [](const ElasticRequest& request, int64_t ranks_per_node, int64_t model_parallel, int64_t ranks) {
        const ElasticNodePlan plan = elastic_node_plan(request, {ranks_per_node, model_parallel}, ranks);
        return py::make_tuple(plan.batch, plan.worlds, plan.micro, plan.listed);
      },
      py::arg("request"), py::arg("ranks_per_node"), py::arg("model_parallel"), py::arg("ranks"));
}
