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

parallel::SequenceLayoutPtr sequence_layout(std::vector<int64_t> tokens, HeadRuns heads, int64_t sequence_dim,
                                            bool heads_first) {
  return std::make_shared<SequenceLayout>(
      SequenceLayout{plan::SequenceCut(std::move(tokens), std::move(heads)), sequence_dim, heads_first});
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
      .def(py::init([](comm::CommunicatorPtr communicator) {
             return std::make_shared<SequenceExchange>(std::move(communicator));
           }),
           "communicator"_a)
      .def(
          "to_heads",
          [](SequenceExchange& self, const std::vector<at::Tensor>& parts, std::vector<int64_t> tokens, HeadRuns heads,
             int64_t sequence_dim, bool heads_first) {
            return self.to_heads(parts,
                                 sequence_layout(std::move(tokens), std::move(heads), sequence_dim, heads_first));
          },
          "parts"_a, "tokens"_a, "heads"_a, "sequence_dim"_a, "heads_first"_a, Unlocked())
      .def(
          "to_sequence",
          [](SequenceExchange& self, const std::vector<at::Tensor>& wholes, std::vector<int64_t> tokens, HeadRuns heads,
             int64_t sequence_dim, bool heads_first) {
            return self.to_sequence(wholes,
                                    sequence_layout(std::move(tokens), std::move(heads), sequence_dim, heads_first));
          },
          "wholes"_a, "tokens"_a, "heads"_a, "sequence_dim"_a, "heads_first"_a, Unlocked())
      .def(
          "start_to_heads",
          [](SequenceExchange& self, const std::vector<at::Tensor>& parts, std::vector<int64_t> tokens, HeadRuns heads,
             int64_t sequence_dim) {
            const auto layout = sequence_layout(std::move(tokens), std::move(heads), sequence_dim, false);
            parallel::Exchanged made = self.start_to_heads(parts, *layout, true);
            return StartedExchange(std::move(made.tensors), std::move(made.work));
          },
          "parts"_a, "tokens"_a, "heads"_a, "sequence_dim"_a, Unlocked())
      .def(
          "start_to_sequence",
          [](SequenceExchange& self, const std::vector<at::Tensor>& wholes, std::vector<int64_t> tokens, HeadRuns heads,
             int64_t sequence_dim) {
            const auto layout = sequence_layout(std::move(tokens), std::move(heads), sequence_dim, false);
            parallel::Exchanged made = self.start_to_sequence(wholes, *layout, true);
            return StartedExchange(std::move(made.tensors), std::move(made.work));
          },
          "wholes"_a, "tokens"_a, "heads"_a, "sequence_dim"_a, Unlocked())
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
