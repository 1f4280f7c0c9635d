// Sums over ranks of rows that travel as blocks of integers, without an engine: csrc/comm/compressed/block_reduce.h.
#include "comm/compressed/block_reduce.h"

#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include <ATen/ops/empty.h>
#include <pybind11/stl.h>

#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/registry.h"
#include "zero/device_context.h"

namespace py = pybind11;

namespace ds::bindings {

namespace {

// `hosts`: the ranks of each host, of which the own one has this rank at `local`. Collective.
at::Tensor block_reduce(const comm::CommunicatorPtr& ranks, const std::optional<comm::CommunicatorPtr>& inner,
                        const std::optional<comm::CommunicatorPtr>& outer, std::vector<std::vector<int>> hosts,
                        std::pair<int, int> place, const at::Tensor& rows, int threads) {
  if (!rows.is_contiguous() || rows.dim() != 2 || rows.size(0) != ranks->size())
    fail(ErrorKind::kValue, "block_reduce takes a contiguous row for each of ", ranks->size(), " ranks, got ",
         rows.sizes());
  const comm::HostRanks by_host = {
      {std::move(hosts), place.first, place.second}, inner.value_or(nullptr), outer.value_or(nullptr)};
  zero::DeviceContext device(rows.device(), threads);
  const c10::DeviceGuard current(rows.device());
  const comm::BlockReduce::Place where = {
      [&](const comm::BlockReduce::Call& call) {
        device.run([&](const kernels::Launch& launch) { call(device.codes(), launch); });
      },
      [&](int64_t bytes) { return at::empty({bytes}, rows.options().dtype(at::kByte)); }};
  comm::BlockReduce reduce(ranks, by_host, rows.size(1));
  const at::Tensor row = at::empty({rows.size(1)}, rows.options());
  reduce.start(where, rows, {}, "block_reduce")->wait();
  reduce.receive(where, row, {});
  if (reduce.in_two_steps()) {
    reduce.send_again(where, "block_reduce");
    reduce.finish(where, row);
  }
  device.check();
  return row;
}

}  // namespace

DS_BINDINGS(m) {
  m.def("block_reduce", &block_reduce, py::call_guard<py::gil_scoped_release>(), "ranks"_a, "inner"_a, "outer"_a,
        "hosts"_a, "place"_a, "rows"_a, "threads"_a);
}

}  // namespace ds::bindings
