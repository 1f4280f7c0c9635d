// deepspeed._C.SequenceExchange: csrc/parallel/sequence_exchange.h.
#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include "bindings/registry.h"
#include "comm/communicator.h"
#include "parallel/sequence_exchange.h"

namespace py = pybind11;

namespace ds::bindings {

namespace {

using parallel::SequenceExchange;
using parallel::SequenceLayout;
using HeadRuns = std::vector<std::vector<plan::HeadRun>>;
using TensorsOfRanks = std::vector<std::vector<at::Tensor>>;
using StartedExchange = std::pair<std::vector<at::Tensor>, comm::WorkPtr>;

using Tensors = std::vector<at::Tensor>;

// `method` with a layout of what Python passes.
auto with_layout(Tensors (SequenceExchange::*method)(const Tensors&, const parallel::SequenceLayoutPtr&)) {
  return [method](SequenceExchange& self, const Tensors& tensors, std::vector<int64_t> tokens, HeadRuns heads,
                  int64_t sequence_dim, bool heads_first) {
    return (self.*method)(
        tensors, std::make_shared<SequenceLayout>(SequenceLayout{plan::SequenceCut(std::move(tokens), std::move(heads)),
                                                                 sequence_dim, heads_first}));
  };
}

auto with_layout(parallel::Exchanged (SequenceExchange::*method)(const Tensors&, const SequenceLayout&, bool)) {
  return [method](SequenceExchange& self, const Tensors& tensors, std::vector<int64_t> tokens, HeadRuns heads,
                  int64_t sequence_dim) {
    parallel::Exchanged made =
        (self.*method)(tensors, {plan::SequenceCut(std::move(tokens), std::move(heads)), sequence_dim}, true);
    return StartedExchange(std::move(made.tensors), std::move(made.work));
  };
}

comm::StridedParts::Views views_of(const TensorsOfRanks& tensors) {
  comm::StridedParts::Views views;
  for (const auto& of_rank : tensors) views.emplace_back(of_rank.begin(), of_rank.end());
  return views;
}

}  // namespace

DS_BINDINGS(m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  // tokens: of each rank. heads: of each tensor the run of each rank. The first two have gradients, and are complete on
  // return; the others have none, and a work to wait for.
  py::class_<SequenceExchange, std::shared_ptr<SequenceExchange>>(m, "SequenceExchange")
      .def(py::init<comm::CommunicatorPtr>(), "communicator"_a)
      .def("to_heads", with_layout(&SequenceExchange::to_heads), "parts"_a, "tokens"_a, "heads"_a, "sequence_dim"_a,
           "heads_first"_a, Unlocked())
      .def("to_sequence", with_layout(&SequenceExchange::to_sequence), "wholes"_a, "tokens"_a, "heads"_a,
           "sequence_dim"_a, "heads_first"_a, Unlocked())
      .def("start_to_heads", with_layout(&SequenceExchange::start_to_heads), "parts"_a, "tokens"_a, "heads"_a,
           "sequence_dim"_a, Unlocked())
      .def("start_to_sequence", with_layout(&SequenceExchange::start_to_sequence), "wholes"_a, "tokens"_a, "heads"_a,
           "sequence_dim"_a, Unlocked())
      // give, take: lists of tensors for each rank.
      .def(
          "start_views",
          [](SequenceExchange& self, const TensorsOfRanks& give, const TensorsOfRanks& take) {
            return self.start_views(views_of(give), views_of(take));
          },
          "give"_a, "take"_a, Unlocked())
      .def_property_readonly("communicator", &SequenceExchange::communicator)
      .def_property_readonly("calls", &SequenceExchange::calls)
      .def_property_readonly("elements", &SequenceExchange::elements);
}

}  // namespace ds::bindings
