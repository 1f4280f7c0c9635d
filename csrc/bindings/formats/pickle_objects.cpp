#include "bindings/formats/pickle_objects.h"

#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "formats/format_error.h"

namespace py = pybind11;

namespace ds::bindings {
namespace {

using namespace formats;

// Asks Python about names that are not in the table, and keeps what they stand for.
class ProcessNames : public NameResolver {
 public:
  explicit ProcessNames(const py::object& names) : names_(names), asks_first_(names.attr("asks_first").cast<bool>()) {}

  Global find(const std::string& module, const std::string& name) override {
    Global found;
    const bool known = in_table(module, name, &found);
    if (known && !asks_first_) return found;
    const py::object answer = names_.attr("find")(text_of(module), text_of(name), known);
    if (answer.is_none()) return found;
    const py::tuple facts = answer;
    const std::string use = facts[1].cast<std::string>();
    found.use = use == "trusted" ? NameUse::kTrusted : use == "plain" ? NameUse::kPlain : NameUse::kValue;
    found.is_enum = facts[2].cast<bool>();
    found.cheap_key = facts[3].cast<bool>();
    found.unguarded = facts[4].cast<bool>();
    found.token = static_cast<uint32_t>(values_.size()) + 1;
    values_.push_back(facts[0]);
    return found;
  }

  py::object value(const Global& global) const { return values_[global.token - 1]; }

 private:
  static py::object text_of(const std::string& text) {
    return py::reinterpret_steal<py::object>(
        PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogatepass"));
  }

  py::object names_;
  bool asks_first_;
  std::vector<py::object> values_;
};

py::object checked(PyObject* made) {
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

void checked(int status) {
  if (status != 0) throw py::error_already_set();
}

class ObjectMaker {
 public:
  ObjectMaker(const PickleGraph& graph, const ProcessNames& resolver, const py::object& names, const py::dict& values,
              const py::object& storages)
      : graph_(graph),
        resolver_(resolver),
        names_(names),
        values_(values),
        tensor_(storages.attr("tensor")),
        memories_(storages.attr("memories")) {}

  py::object make() {
    made_.reserve(graph_.nodes.size());
    try {
      for (const Step& step : graph_.steps) {
        make_nodes(step.nodes);
        at_ = step.at;
        do_step(step);
      }
      make_nodes(graph_.nodes.size());
    } catch (py::error_already_set& error) {
      explain(error);
    }
    return made_[graph_.root];
  }

 private:
  void make_nodes(size_t count) {
    while (made_.size() < count) {
      const Node& node = graph_.nodes[made_.size()];
      at_ = node.at;
      made_.push_back(make_node(node));
    }
  }

  py::object make_node(const Node& node) {
    switch (node.kind) {
      case Kind::kNone: return py::none();
      case Kind::kBool: return py::bool_(node.number != 0);
      case Kind::kInt: return checked(PyLong_FromLongLong(node.number));
      case Kind::kFloat: return checked(PyFloat_FromDouble(node.real));
      case Kind::kBigInt:
        return py::handle(reinterpret_cast<PyObject*>(&PyLong_Type))
            .attr("from_bytes")(bytes(node), "little", py::arg("signed") = true);
      case Kind::kDecimal:
        return checked(PyLong_FromString(std::string(graph_.texts[node.index]).c_str(), nullptr, 10));
      case Kind::kText: {
        const std::string_view text = graph_.texts[node.index];
        return checked(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogatepass"));
      }
      case Kind::kBytes: return bytes(node);
      case Kind::kByteArray: {
        const std::string_view text = graph_.texts[node.index];
        return checked(PyByteArray_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
      }
      case Kind::kTuple: return tuple(node.begin, node.count);
      case Kind::kFrozenSet: return checked(PyFrozenSet_New(tuple(node.begin, node.count).ptr()));
      case Kind::kList: return py::list();
      case Kind::kDict: return py::dict();
      case Kind::kSet: return py::set();
      case Kind::kGlobal: return global(graph_.globals[node.index]);
      case Kind::kObject: return object(node);
      case Kind::kStorage: return py::object(memories_[py::int_(node.index)]);
      case Kind::kTensor: return tensor(graph_.tensors[node.index]);
    }
    return py::none();
  }

  py::object bytes(const Node& node) const {
    const std::string_view text = graph_.texts[node.index];
    return checked(PyBytes_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
  }

  py::tuple tuple(uint32_t begin, uint32_t count) const {
    py::tuple made(count);
    for (uint32_t i = 0; i < count; ++i) made[i] = made_[graph_.parts[begin + i]];
    return made;
  }

  py::object global(const Global& found) const {
    if (found.token != 0) return resolver_.value(found);
    const std::string full = found.full();
    if (values_.contains(full.c_str())) return values_[full.c_str()];
    return py::module_::import(found.module.c_str()).attr(found.name.c_str());
  }

  py::object object(const Node& node) const {
    const Ref* parts = graph_.parts.data() + node.begin;
    const Global& called = graph_.globals[graph_.nodes[parts[0]].index];
    const py::object& function = made_[parts[0]];
    const bool keywords = node.call == Call::kNewWithKeywords;
    const py::tuple arguments = tuple(node.begin + 1, node.count - 1 - (keywords ? 1 : 0));
    if (called.use == NameUse::kPlain) return names_.attr("make")(function, arguments);
    if (called.use == NameUse::kTrusted && node.call != Call::kReduce) {
      const py::dict given = keywords ? py::dict(made_[parts[node.count - 1]]) : py::dict();
      return function.attr("__new__")(function, *arguments, **given);
    }
    return checked(PyObject_CallObject(function.ptr(), arguments.ptr()));
  }

  py::object tensor(const StoredTensor& stored) const {
    return tensor_(stored.storage, py::str(stored.element->name.data(), stored.element->name.size()), stored.offset,
                   py::tuple(py::cast(stored.shape)), py::tuple(py::cast(stored.stride)), stored.requires_grad);
  }

  py::list items(const Step& step) const {
    py::list found(step.count);
    for (uint32_t i = 0; i < step.count; ++i) found[i] = made_[graph_.parts[step.begin + i]];
    return found;
  }

  void do_step(const Step& step) const {
    const py::object& target = made_[step.target];
    const auto part = [&](uint32_t i) { return made_[graph_.parts[step.begin + i]].ptr(); };
    const Kind kind = graph_.nodes[step.target].kind;
    switch (step.op) {
      case Step::kExtend:
        if (kind != Kind::kList) {
          names_.attr("extend")(target, items(step));
          return;
        }
        for (uint32_t i = 0; i < step.count; ++i) checked(PyList_Append(target.ptr(), part(i)));
        return;
      case Step::kSetItems:
        if (kind != Kind::kDict) {
          names_.attr("set_items")(target, items(step));
          return;
        }
        for (uint32_t i = 0; i < step.count; i += 2) checked(PyDict_SetItem(target.ptr(), part(i), part(i + 1)));
        return;
      case Step::kAddItems:
        if (kind != Kind::kSet) {
          names_.attr("add_items")(target, items(step));
          return;
        }
        for (uint32_t i = 0; i < step.count; ++i) checked(PySet_Add(target.ptr(), part(i)));
        return;
      case Step::kBuild: names_.attr("build")(target, made_[graph_.parts[step.begin]]);
    }
  }

  // Turns Python's error about a damaged file into an error of pickles that names the offset.
  [[noreturn]] void explain(py::error_already_set& error) const {
    const py::object wanted = py::module_::import("pickle").attr("UnpicklingError");
    if (error.matches(wanted)) throw;
    std::string text;
    if (error.matches(PyExc_MemoryError) || error.matches(PyExc_RecursionError)) {
      text = "the pickle asks for too much at byte " + std::to_string(at_);
    } else {
      bool expected = false;
      for (PyObject* type : {PyExc_ArithmeticError, PyExc_AssertionError, PyExc_AttributeError, PyExc_LookupError,
                             PyExc_RuntimeError, PyExc_TypeError, PyExc_ValueError})
        expected = expected || error.matches(type);
      if (!expected) throw;
      text = "damaged pickle at byte " + std::to_string(at_) + ": ";
      if (error.matches(PyExc_KeyError)) text += "no ";
      text += std::string(py::str(error.value()));
    }
    py::raise_from(error, wanted.ptr(), text.c_str());
    throw py::error_already_set();
  }

  const PickleGraph& graph_;
  const ProcessNames& resolver_;
  py::object names_;
  py::dict values_;
  py::object tensor_;
  py::list memories_;
  std::vector<py::object> made_;
  uint64_t at_ = 0;
};

}  // namespace

void raise_refused(const py::object& names, const std::string& name) {
  const py::object error = names.attr("refused")(name);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw py::error_already_set();
}

py::object load_archive(TorchArchive& archive, const py::object& names, const py::dict& values,
                        const py::object& storages) {
  ProcessNames resolver(names);
  const PickleGraph graph = refusing(names, [&] { return archive.read_structure(resolver); });
  py::list records;
  for (const StoredMemory& memory : graph.storages) {
    const StorageRecord found = archive.record_of(memory);
    const py::object record = found.packed ? py::object(py::str(found.record)) : py::object(py::none());
    records.append(py::make_tuple(std::string(memory.element->name), found.offset, found.bytes, record));
  }
  storages.attr("prepare")(records);
  return ObjectMaker(graph, resolver, names, values, storages).make();
}

}  // namespace ds::bindings
