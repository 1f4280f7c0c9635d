// Writes of the user into the weights of an engine, numbers that its ranks have alike, changes that all ranks make.
#include <Python.h>

#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include "bindings/registry.h"
#include "zero/engine.h"

namespace py = pybind11;

namespace ds::bindings {

namespace {

using zero::Engine;
using Unlocked = py::call_guard<py::gil_scoped_release>;

// A change of masters or shards, for the time of a `with`.
struct WriteContext {
  std::shared_ptr<Engine> engine;
  std::unique_ptr<zero::WriteScope> scope{};

  void enter() {
    engine->failures().guard([&] { scope = std::make_unique<zero::WriteScope>(engine->states()); });
  }
  // `failed`: an exception leaves the context, and nothing that goes wrong here may hide it.
  void leave(bool failed) {
    const auto open = std::move(scope);
    if (!failed && open) engine->failures().guard([&] { open->close(); });
  }
};

// At stage 3 other ranks may be reading slices.
void adopt_writes(Engine& engine) {
  engine.failures().guard([&] {
    engine.writes().bring_home();
    if (!engine.policy().shards_params()) return engine.writes().adopt();
    engine.grads().agreement().meet(engine.params().everyone(), engine.params().device());
    zero::WriteScope scope(engine.states());
    engine.writes().adopt();
    scope.close();
  });
}

// Returns the numbers of the rows whose place holds another object now. A row: a module's dict of parameters, a name,
// the parameter that was there.
std::vector<size_t> bring_home(Engine& engine, const py::list& rows) {
  std::vector<size_t> found;
  for (size_t number = 0; number < rows.size(); ++number) {
    PyObject* row = PyList_GET_ITEM(rows.ptr(), static_cast<Py_ssize_t>(number));
    PyObject* now = PyDict_GetItem(PyTuple_GET_ITEM(row, 0), PyTuple_GET_ITEM(row, 1));
    if (now != nullptr && now != Py_None && now != PyTuple_GET_ITEM(row, 2)) found.push_back(number);
  }
  py::gil_scoped_release unlocked;
  engine.failures().guard([&] { engine.writes().bring_home(); });
  return found;
}

}  // namespace

DS_BINDINGS(m) {
  m.def(
      "agree",
      [](Engine& engine, int rank, std::vector<std::string> names, std::vector<double> numbers) {
        engine.grads().agreement().tell(rank, std::move(names), std::move(numbers));
      },
      "core"_a, "rank"_a, "names"_a, "numbers"_a, "Numbers that all ranks must have alike as the next backward ends.");
  py::class_<WriteContext>(
      m, "WriteContext", "A context in which masters or shards are changed by all ranks; it closes on exceptions, too.")
      .def(py::init([](const std::shared_ptr<Engine>& engine) { return WriteContext{engine}; }), "core"_a)
      .def("__enter__", &WriteContext::enter, Unlocked())
      .def("__exit__", [](WriteContext& context, const py::object& type, const py::object&, const py::object&) {
        const bool failed = !type.is_none();
        py::gil_scoped_release unlocked;
        context.leave(failed);
      });

  m.def(
      "bring_home", &bring_home, "core"_a, "rows"_a,
      "Parameters whose data somebody has replaced return to the flat buffer, with the new values. Of rows (dict of a "
      "module, name, the parameter that was there): the numbers of those where another one is there now.");
  m.def("adopt_writes", &adopt_writes, Unlocked(), "core"_a,
        "Masters take what the user has written into the weights. All ranks call it.");
  m.def(
      "take_value",
      [](Engine& engine, size_t param, const at::Tensor& value) { engine.writes().bring_home(param, value); },
      Unlocked(), "core"_a, "param"_a, "value"_a, "The parameter takes the values of a tensor like it.");
  m.def(
      "follow_moves",
      [](Engine& engine) {
        engine.params().follow_moves();
        engine.grads().follow_moves();
      },
      "core"_a, "After planes of parameters have moved.");
  m.def(
      "flat_params", [](Engine& engine) { return engine.params().flat_params(); }, "core"_a,
      "The buffers in which whole parameters lie.");
}

}  // namespace ds::bindings
