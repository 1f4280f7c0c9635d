// The softmax over a vocabulary that ranks share: csrc/parallel/vocab_softmax.h.
#include "parallel/vocab_softmax.h"

#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include <tuple>

#include "bindings/registry.h"

namespace py = pybind11;

namespace ds::bindings {

DS_BINDINGS(m) {
  m.def(
      "vocab_sums",
      [](comm::CommunicatorPtr ranks, std::tuple<int64_t, int64_t, int64_t> words, const at::Tensor& logits,
         const at::Tensor& targets, int64_t ignored, bool overwrite) {
        const auto [start, stop, all] = words;
        const auto made =
            parallel::vocab_sums({std::move(ranks), start, stop, all}, logits, targets, ignored, overwrite);
        return std::make_tuple(made.normalizers, made.picked, made.totals);
      },
      "ranks"_a, "words"_a, "logits"_a, "targets"_a, "ignored"_a, "overwrite"_a = false,
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace ds::bindings
