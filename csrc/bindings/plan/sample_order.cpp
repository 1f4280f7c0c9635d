// deepspeed._C.samples: csrc/plan/sample_order.h, and the index of an indexed data set, csrc/formats/indexed_dataset.h.
#include "plan/sample_order.h"

#include <pybind11/stl.h>

#include <tuple>

#include "base/error.h"
#include "bindings/registry.h"
#include "formats/format_error.h"
#include "formats/indexed_dataset.h"

namespace py = pybind11;

namespace ds::bindings {

namespace {

using plan::SampleOrder;
// SampleOrder::State: last, joins, round, drawn, taken, weights.
using State = std::tuple<bool, int64_t, int64_t, int64_t, std::vector<int64_t>, std::vector<int64_t>>;

State state_of(const SampleOrder& order) {
  const SampleOrder::State& now = order.state();
  return {now.last, now.joins, now.round, now.drawn, now.taken, now.weights};
}

SampleOrder restored(uint64_t seed, const std::vector<int64_t>& sizes, const State& saved) {
  const auto& [last, joins, round, drawn, taken, weights] = saved;
  return SampleOrder::restored(seed, sizes, {last, joins, round, drawn, taken, weights});
}

void draw(SampleOrder& order, const py::buffer& to) {
  const py::buffer_info memory = to.request(true);
  if (memory.itemsize != 8 || memory.ndim != 1 || memory.strides[0] != 8) {
    fail(ErrorKind::kType, "numbers of samples go into an array of int64");
  }
  order.draw(memory.size, static_cast<int64_t*>(memory.ptr));
}

py::dict indexed_header(const std::string& index, uint64_t data_bytes) {
  const formats::IndexedHeader found = formats::read_indexed_header(formats::CheckedFile(index), data_bytes);
  return py::dict("element"_a = found.element, "documents"_a = found.documents, "sizes_at"_a = found.sizes_at,
                  "pointers_at"_a = found.pointers_at, "doc_idx_at"_a = found.doc_idx_at,
                  "doc_entries"_a = found.doc_entries, "size_bytes"_a = found.size_bytes,
                  "pointer_unit"_a = found.pointer_unit);
}

}  // namespace

DS_BINDINGS(m) {
  auto samples = m.def_submodule("samples");
  py::class_<SampleOrder>(samples, "Order")
      .def(py::init<uint64_t>(), "seed"_a)
      .def_static("restored", &restored, "seed"_a, "sizes"_a, "state"_a)
      .def("join", &SampleOrder::join, "sizes"_a, "last"_a)
      .def("draw", &draw, "to"_a, "Fills an array of int64 with the numbers of samples in the pool.")
      .def("state", &state_of);
  py::register_exception<formats::DamagedIndex>(samples, "DamagedIndex", PyExc_ValueError);
  samples.def("indexed_header", &indexed_header, "index"_a, "data_bytes"_a);
}

}  // namespace ds::bindings
