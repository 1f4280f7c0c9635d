// deepspeed._C.pipe: plans of pipelines, their proof and their cost: csrc/plan/pipe_*.h.
#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/registry.h"
#include "plan/pipe_check.h"
#include "plan/pipe_cost.h"
#include "plan/pipe_schedule.h"

namespace py = pybind11;

namespace ds::bindings {

namespace {

using plan::PipeAct;
using plan::PipeCosts;
using plan::PipePart;
using plan::PipePlacement;
using plan::PipePlan;
using plan::PipeRankCost;
using plan::PipeShape;

PipePlacement placement_named(const std::string& name) {
  if (name == "loop") return PipePlacement::kLoop;
  if (name == "v") return PipePlacement::kV;
  fail(ErrorKind::kValue, "there is no placement \"", name, "\" of virtual stages: there are loop and v");
}

PipeCosts costs_of(std::vector<PipePart> parts, double latency, double bytes_per_second) {
  return {std::move(parts), latency, bytes_per_second};
}

const std::vector<PipeAct>& acts_of(const PipePlan& plan, int rank) {
  if (rank < 0 || rank >= static_cast<int>(plan.ranks.size()))
    fail(ErrorKind::kIndex, "there is no stage ", rank, ": the pipeline has ", plan.ranks.size());
  return plan.ranks[rank];
}

}  // namespace

DS_BINDINGS(m) {
  auto pipe = m.def_submodule("pipe");
  py::class_<PipeAct>(pipe, "Act")
      .def(py::init([](const std::string& op, int micro, int chunk, int buffer, int peer) {
             return PipeAct{plan::pipe_op_named(op), micro, chunk, buffer, peer};
           }),
           "op"_a, "micro"_a, "chunk"_a, "buffer"_a, "peer"_a = -1)
      .def_property_readonly("op", [](const PipeAct& act) { return plan::pipe_op_name(act.op); })
      .def_readonly("micro", &PipeAct::micro)
      .def_readonly("chunk", &PipeAct::chunk)
      .def_readonly("buffer", &PipeAct::buffer)
      .def_readonly("peer", &PipeAct::peer)
      .def("__eq__", [](const PipeAct& a, const PipeAct& b) { return a == b; })
      .def("__repr__", [](const PipeAct& act) { return plan::text(act); });

  py::class_<PipeShape>(pipe, "Shape")
      .def(py::init([](int stages, int chunks, int micro_batches, const std::string& placement) {
             PipeShape shape{stages, chunks, micro_batches, placement_named(placement)};
             shape.check();
             return shape;
           }),
           "stages"_a, "chunks"_a = 1, "micro_batches"_a = 1, "placement"_a = "loop")
      .def_readonly("stages", &PipeShape::stages)
      .def_readonly("chunks", &PipeShape::chunks)
      .def_readonly("micro_batches", &PipeShape::micro_batches)
      .def_property_readonly("placement",
                             [](const PipeShape& s) { return s.placement == PipePlacement::kV ? "v" : "loop"; })
      .def("virtual_stage", &PipeShape::virtual_stage, "rank"_a, "chunk"_a)
      .def("chunk_of", &PipeShape::chunk_of, "virtual_stage"_a)
      .def("rank_of", &PipeShape::rank_of, "virtual_stage"_a);

  pipe.attr("SEND_BOUND") = plan::kPipeSendBound;
  py::class_<PipePlan>(pipe, "Plan")
      .def(py::init([](const std::string& schedule, const PipeShape& shape, bool trains,
                       const std::vector<std::vector<PipeAct>>& ranks, const std::vector<int>& buffers) {
             return PipePlan{schedule, shape, trains, ranks, buffers};
           }),
           "schedule"_a, "shape"_a, "trains"_a, "ranks"_a, "buffers"_a)
      .def_readonly("schedule", &PipePlan::schedule)
      .def_readonly("shape", &PipePlan::shape)
      .def_readonly("trains", &PipePlan::trains)
      .def_readonly("buffers", &PipePlan::buffers)
      .def("acts", &acts_of, "rank"_a)
      .def("slots", &plan::pipe_slots, "rank"_a)
      .def("check", &plan::pipe_check, "send_bound"_a = plan::kPipeSendBound)
      .def(
          "cost",
          [](const PipePlan& plan, std::vector<PipePart> parts, double latency, double bytes_per_second,
             int send_bound) {
            return plan::pipe_cost(plan, costs_of(std::move(parts), latency, bytes_per_second), send_bound);
          },
          "parts"_a, "latency"_a = 0.0, "bytes_per_second"_a = 0.0, "send_bound"_a = plan::kPipeSendBound)
      .def("timeline", &plan::pipe_timeline, "cost"_a, "width"_a);

  py::class_<PipePart>(pipe, "Part")
      .def(py::init([](double forward, double backward_input, double backward_weight, int64_t activation_bytes,
                       int64_t weight_bytes, int64_t output_bytes, int64_t state_bytes,
                       const std::array<int64_t, 4>& pass_bytes) {
             return PipePart{forward,      backward_input, backward_weight, activation_bytes,
                             weight_bytes, output_bytes,   state_bytes,     pass_bytes};
           }),
           py::kw_only(), "forward"_a = 1.0, "backward_input"_a = 1.0, "backward_weight"_a = 1.0,
           "activation_bytes"_a = 0, "weight_bytes"_a = 0, "output_bytes"_a = 0, "state_bytes"_a = 0,
           "pass_bytes"_a = std::array<int64_t, 4>{});
  py::class_<plan::PipeSpan>(pipe, "Span")
      .def_readonly("start", &plan::PipeSpan::start)
      .def_readonly("end", &plan::PipeSpan::end);
  py::class_<PipeRankCost>(pipe, "RankCost")
      .def_readonly("busy", &PipeRankCost::busy)
      .def_readonly("peak_live", &PipeRankCost::peak_live)
      .def_readonly("peak_bytes", &PipeRankCost::peak_bytes)
      .def_readonly("bytes_sent", &PipeRankCost::bytes_sent)
      .def_readonly("acts", &PipeRankCost::acts);
  py::class_<plan::PipeCost>(pipe, "Cost")
      .def_readonly("seconds", &plan::PipeCost::seconds)
      .def_readonly("bubble", &plan::PipeCost::bubble)
      .def_readonly("ranks", &plan::PipeCost::ranks);

  pipe.def("schedules", [] {
    std::vector<std::string> names;
    for (const plan::PipeScheduleKind& kind : plan::pipe_schedule_kinds())
      if (kind.trains) names.push_back(kind.name);
    return names;
  });
  pipe.def(
      "schedule",
      [](const std::string& name, int stages, int chunks, int micro_batches, const std::string& placement) {
        return plan::pipe_schedule(name, stages, chunks, micro_batches, placement_named(placement));
      },
      "name"_a, "stages"_a, "chunks"_a, "micro_batches"_a, "placement"_a = "loop");
  pipe.def(
      "fastest",
      [](const PipeShape& shape, std::vector<PipePart> parts, double latency, double bytes_per_second,
         int64_t memory_limit) {
        plan::PipeChoice choice =
            plan::fastest_pipe_plan(shape, costs_of(std::move(parts), latency, bytes_per_second), memory_limit);
        return std::make_pair(std::move(choice.plan), std::move(choice.cost));
      },
      "shape"_a, "parts"_a, "latency"_a = 0.0, "bytes_per_second"_a = 0.0, "memory_limit"_a = 0);
}

}  // namespace ds::bindings
