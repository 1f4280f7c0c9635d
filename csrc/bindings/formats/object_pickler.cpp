#include "bindings/formats/object_pickler.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <unordered_map>

#include "base/error.h"
#include "bindings/formats/pickled_globals.h"
#include "bindings/formats/tensor_names.h"
#include "formats/pickle_writer.h"

namespace py = pybind11;

namespace ds::bindings {
namespace {

constexpr const char* kStorage = "deepspeed.storage";  // the name of capsules that stand for storages

py::object owned_object(PyObject* made) {
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

template <typename Type>
bool is_exactly(const py::handle& object, const Type& type) {
  return reinterpret_cast<const void*>(Py_TYPE(object.ptr())) == reinterpret_cast<const void*>(&type);
}

py::object type_of(const py::object& object) {
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())));
}

bool has_type(const py::object& object, const py::object& type) {
  return reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) == type.ptr();
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_quantized() && !tensor.is_meta();
}

std::string_view utf8_of(const py::handle& text, py::object* kept) {
  Py_ssize_t size;
  const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (data == nullptr) {  // lone surrogates
    PyErr_Clear();
    *kept = owned_object(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "surrogatepass"));
    data = PyBytes_AS_STRING(kept->ptr());
    size = PyBytes_GET_SIZE(kept->ptr());
  }
  return {data, static_cast<size_t>(size)};
}

class Recursion {
 public:
  Recursion() {
    if (Py_EnterRecursiveCall(" while pickling an object") != 0) throw py::error_already_set();
  }
  ~Recursion() { Py_LeaveRecursiveCall(); }
};

class ObjectPickler {
 public:
  ObjectPickler(const py::object& hooks, bool stream) : hooks_(hooks), stream_(stream) {
    parameter_ = hooks.attr("parameter");
    tensor_ = hooks.attr("tensor");
    pieces_ = hooks.attr("pieces");
    is_storage_ = hooks.attr("storage");
    ordered_dict_ = py::module_::import("collections").attr("OrderedDict");
    dispatch_table_ = py::module_::import("copyreg").attr("dispatch_table");
    torch_utils_ = py::module_::import("torch._utils");
  }

  PickledValue pickle(const py::object& value) {
    names_ = tensor_names(value, pieces_);
    save(value);
    made_.bytes = out_.take();
    return std::move(made_);
  }

 private:
  // ---- one object
  void save(const py::object& object) {
    const auto known = memo_.find(object.ptr());
    if (known != memo_.end()) return out_.get(known->second);
    if (is_exactly(object, PyCapsule_Type) && PyCapsule_IsValid(object.ptr(), kStorage)) {
      const py::object id = storage_ids_.at(object.ptr());
      save_known(id);
      out_.persistent();
      return;
    }
    if (maybe_storage(object)) {
      const py::object found = is_storage_(object);
      if (!found.is_none()) {
        save_storage(found);
        return;
      }
    }
    save_known(object);
  }

  // Most objects of a state: that they are no storages is known without a question.
  bool maybe_storage(const py::object& object) const {
    for (const PyTypeObject* type : {&PyUnicode_Type, &PyLong_Type, &PyFloat_Type, &PyBool_Type, &PyTuple_Type,
                                     &PyDict_Type, &PyList_Type, &PyBytes_Type, &PyType_Type}) {
      if (Py_TYPE(object.ptr()) == type) return false;
    }
    return !object.is_none() && !has_type(object, ordered_dict_) && !has_type(object, tensor_) &&
           !has_type(object, parameter_);
  }

  void save_known(const py::object& object) {
    PyObject* raw = object.ptr();
    if (object.is_none()) return out_.none();
    if (PyBool_Check(raw)) return out_.boolean(raw == Py_True);
    if (is_exactly(object, PyLong_Type)) return save_int(object);
    if (is_exactly(object, PyFloat_Type)) return out_.real(PyFloat_AS_DOUBLE(raw));
    const auto known = memo_.find(raw);
    if (known != memo_.end()) return out_.get(known->second);
    if (is_exactly(object, PyBytes_Type)) return save_bytes(object);
    if (is_exactly(object, PyUnicode_Type)) {
      py::object kept;
      out_.text(utf8_of(object, &kept));
      return remember(object);
    }
    const Recursion entered;
    if (is_exactly(object, PyDict_Type)) return save_dict(object);
    if (is_exactly(object, PySet_Type) || is_exactly(object, PyFrozenSet_Type)) {
      return save_call(type_of(object), py::make_tuple(py::list(object)), object);
    }
    if (is_exactly(object, PyList_Type)) return save_list(object);
    if (is_exactly(object, PyTuple_Type)) return save_tuple(object);
    if (is_exactly(object, PyByteArray_Type)) {
      py::tuple arguments;
      if (PyByteArray_GET_SIZE(raw) > 0) arguments = py::make_tuple(owned_object(PyBytes_FromObject(raw)));
      return save_call(type_of(object), arguments, object);
    }
    if (save_tensor(object)) return;
    if (is_exactly(object, PyType_Type)) return save_type(object);
    if (is_exactly(object, PyFunction_Type)) return save_global(object, py::none());
    save_other(object);
  }

  void save_other(const py::object& object) {
    const py::object type = type_of(object);
    py::object answer;
    if (dispatch_table_.contains(type)) {
      answer = dispatch_table_[type](object);
    } else if (PyType_IsSubtype(Py_TYPE(object.ptr()), &PyType_Type) != 0) {
      return save_global(object, py::none());
    } else {
      answer = object.attr("__reduce_ex__")(2);
    }
    if (PyUnicode_Check(answer.ptr())) return save_global(object, answer);
    if (!PyTuple_Check(answer.ptr())) raise_pickling_error("__reduce__ must return a string or tuple");
    save_reduced(py::tuple(answer), object);
  }

  void remember(const py::object& object) {
    kept_.push_back(object);
    memo_[object.ptr()] = out_.put();
  }

  // ---- plain values
  void save_int(const py::object& object) {
    int overflow;
    const long long value = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
    if (overflow == 0) return out_.integer(value);
    const auto size = (object.attr("bit_length")().cast<size_t>() >> 3) + 1;
    const py::bytes bytes = object.attr("to_bytes")(size, "little", py::arg("signed") = true);
    out_.big_integer(std::string_view(bytes));
  }

  void save_bytes(const py::object& object) {
    if (PyBytes_GET_SIZE(object.ptr()) == 0) return save_call(type_of(object), py::make_tuple(), object);
    const py::object text =
        owned_object(PyUnicode_DecodeLatin1(PyBytes_AS_STRING(object.ptr()), PyBytes_GET_SIZE(object.ptr()), "strict"));
    save_call(py::module_::import("_codecs").attr("encode"), py::make_tuple(text, latin1_), object);
  }

  void save_tuple(const py::object& object) {
    const auto items = py::reinterpret_borrow<py::tuple>(object);
    if (items.empty()) return out_.empty_tuple();
    if (items.size() > 3) out_.mark();
    for (const py::handle item : items) save(py::reinterpret_borrow<py::object>(item));
    const auto known = memo_.find(object.ptr());
    if (known != memo_.end()) {  // it contains itself
      for (size_t i = 0; items.size() <= 3 && i < items.size(); ++i) out_.pop();
      if (items.size() > 3) out_.pop_mark();
      return out_.get(known->second);
    }
    out_.tuple(items.size());
    remember(object);
  }

  void save_list(const py::object& object) {
    out_.empty_list();
    remember(object);
    save_items(py::reinterpret_borrow<py::list>(object));
  }

  void save_dict(const py::object& object) {
    out_.empty_dict();
    remember(object);
    save_pairs(py::list(object.attr("items")()));
  }

  // In batches; what is alone has no mark.
  template <typename Save, typename Join>
  void save_batches(const py::list& items, const Save& save_one, const Join& join) {
    if (items.size() == 1) {
      save_one(items[0]);
      return join(true);
    }
    for (size_t begin = 0; begin < items.size(); begin += formats::PickleWriter::kBatch) {
      out_.mark();
      const size_t end = std::min(items.size(), begin + formats::PickleWriter::kBatch);
      for (size_t i = begin; i < end; ++i) save_one(items[i]);
      join(false);
    }
  }

  void save_items(const py::list& items) {
    save_batches(
        items, [this](const py::object& item) { save(item); }, [this](bool one) { out_.append(one); });
  }

  void save_pairs(const py::list& items) {
    save_batches(
        items,
        [this](const py::object& item) {
          if (!PyTuple_Check(item.ptr()) || PyTuple_GET_SIZE(item.ptr()) != 2) {
            PyErr_SetString(PyExc_TypeError, "dict items iterator must return 2-tuples");
            throw py::error_already_set();
          }
          const auto pair = py::reinterpret_borrow<py::tuple>(item);
          save(pair[0]);
          save(pair[1]);
        },
        [this](bool one) { out_.set_items(one); });
  }

  // ---- classes, functions, and what their instances say of themselves
  void save_type(const py::object& object) {
    for (const py::object& only :
         {py::object(py::none()), py::object(py::ellipsis()), py::reinterpret_borrow<py::object>(Py_NotImplemented)}) {
      if (type_of(only).is(object)) return save_call(type_of(object), py::make_tuple(only), object);
    }
    save_global(object, py::none());
  }

  void save_global(const py::object& object, const py::object& name) {
    const GlobalName found = global_name(object, name);
    if (found.parent) {
      const py::object getattr = py::module_::import("builtins").attr("getattr");
      return save_call(getattr, py::make_tuple(found.parent, found.attribute), object);
    }
    out_.global(found.module, found.name);
    remember(object);
  }

  void save_call(const py::object& function, const py::tuple& arguments, const py::object& object) {
    save(function);
    save(arguments);
    out_.reduce();
    remember(object);
  }

  // answer: what __reduce_ex__ gave.
  void save_reduced(const py::tuple& answer, const py::object& object) {
    if (answer.size() < 2 || answer.size() > 6) {
      raise_pickling_error("tuple returned by __reduce__ must contain 2 through 6 elements");
    }
    const py::object function = answer[0];
    if (!PyTuple_Check(py::object(answer[1]).ptr())) {
      raise_pickling_error("second item of the tuple returned by __reduce__ must be a tuple");
    }
    const py::tuple arguments = answer[1];
    const auto part = [&answer](size_t i) {
      return i < answer.size() ? py::object(answer[i]) : py::object(py::none());
    };
    const py::object name = py::getattr(function, "__name__", py::none());
    const bool is_text = PyUnicode_Check(name.ptr());
    if (is_text && name.cast<std::string>() == "__newobj__") {
      save(arguments[0]);
      save(arguments[py::slice(1, static_cast<ssize_t>(arguments.size()), 1)]);
      out_.new_object();
    } else if (is_text && name.cast<std::string>() == "__newobj_ex__") {
      const py::object cls = arguments[0];
      const py::tuple given = py::make_tuple(cls.attr("__new__"), cls) + py::tuple(arguments[1]);
      save(py::module_::import("functools").attr("partial")(*given, **py::dict(arguments[2])));
      save(py::make_tuple());
      out_.reduce();
    } else {
      save(function);
      save(arguments);
      out_.reduce();
    }
    const auto known = memo_.find(object.ptr());
    if (known != memo_.end()) {  // its arguments contain it
      out_.pop();
      out_.get(known->second);
    } else {
      remember(object);
    }
    if (!part(3).is_none()) save_items(py::list(part(3)));
    if (!part(4).is_none()) save_pairs(py::list(part(4)));
    if (part(2).is_none()) return;
    if (part(5).is_none()) {
      save(part(2));
      return out_.build();
    }
    save(part(5));
    save(object);
    save(part(2));
    out_.tuple(2);
    out_.reduce();
    out_.pop();
  }

  // ---- tensors and storages
  std::string name_of(const py::handle& object) const {
    const auto found = names_.find(object.ptr());
    return found == names_.end() ? std::string() : found->second;
  }

  bool save_tensor(const py::object& object) {
    if (has_type(object, pieces_)) {
      const auto numel = object.attr("numel").cast<int64_t>();
      Stored stored{source_of_pieces(object), {numel}, {1}, numel};
      const std::string key = "pieces " + std::to_string(reinterpret_cast<uintptr_t>(object.ptr()));
      write_tensor(object, object.attr("dtype"), stored, key, false);
      return true;
    }
    const bool parameter = has_type(object, parameter_);
    if (!parameter && !has_type(object, tensor_)) return false;
    const at::Tensor tensor = THPVariable_Unpack(object.ptr());
    if (!is_plain(tensor)) return false;
    if (parameter) {
      const py::object data = object.attr("data");
      names_[data.ptr()] = name_of(object);
      const py::tuple arguments = py::make_tuple(data, tensor.requires_grad(), ordered_dict_());
      save_call(torch_utils_.attr("_rebuild_parameter"), arguments, object);
      return true;
    }
    const auto source = std::make_shared<TensorSource>(tensor);
    write_tensor(object, object.attr("dtype"), {source, source->shape(), source->stride(), source->numel()},
                 source->key(), tensor.requires_grad());
    return true;
  }

  struct Stored {
    io::SourcePtr source;
    std::vector<int64_t> shape, stride;
    int64_t numel;
  };

  void write_tensor(const py::object& object, const py::object& dtype, const Stored& stored, const std::string& key,
                    bool requires_grad) {
    const py::object known = hooks_.attr("storage_class")(dtype);
    const bool legacy = !known.is_none();
    const py::object storage_class = legacy ? known : hooks_.attr("untyped");
    const size_t record = record_of(object, stored.source, key, storage_class);
    std::string name = name_of(object);
    if (name.empty()) name = "data/" + made_.keys[record];
    const std::string said = py::str(dtype);
    made_.tensors.push_back({name, said.substr(said.rfind('.') + 1), stored.shape, record});
    const uint64_t count = legacy ? static_cast<uint64_t>(stored.numel) : stored.source->bytes();
    py::list arguments;
    arguments.append(storage_id(storage_class, record, count));
    arguments.append(0);
    arguments.append(py::tuple(py::cast(stored.shape)));
    arguments.append(py::tuple(py::cast(stored.stride)));
    arguments.append(requires_grad);
    arguments.append(ordered_dict_());
    if (!legacy) arguments.append(dtype);
    save_call(torch_utils_.attr(legacy ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3"), py::tuple(arguments), object);
  }

  // The record with these bytes: an earlier one over the same memory, or a new one. In a stream a record has one class
  // of storage.
  size_t record_of(const py::object& object, const io::SourcePtr& source, const std::string& key,
                   const py::object& storage_class) {
    kept_.push_back(object);  // an address must not be used again before the file is written
    const std::string known = stream_ ? key + " " + std::string(py::repr(storage_class)) : key;
    const auto [found, is_new] = records_.emplace(known, made_.keys.size());
    if (is_new) {
      made_.keys.push_back(std::to_string(found->second));
      made_.sources.push_back(source);
      made_.counts.push_back(0);
    }
    return found->second;
  }

  // Stands for a storage among arguments.
  py::object storage_id(const py::object& storage_class, size_t record, uint64_t count) {
    made_.counts[record] = count;
    py::object id = py::make_tuple(storage_, storage_class, made_.keys[record], cpu_, count);
    if (stream_) id = id + py::make_tuple(py::none());  // also what part of a storage it is: all of it
    const py::object stands = owned_object(PyCapsule_New(this, kStorage, nullptr));
    storage_ids_[stands.ptr()] = id;
    kept_.push_back(stands);
    return stands;
  }

  // A storage by itself, or of a kind of tensor that torch takes apart (quantized, subclasses): found is
  // (its class, its bytes as a tensor, bytes of an element).
  void save_storage(const py::tuple& found) {
    const py::object content = found[1];
    const auto source = std::make_shared<TensorSource>(THPVariable_Unpack(content.ptr()));
    const size_t record = record_of(content, source, source->key(), found[0]);
    save(storage_id(found[0], record, made_.sources[record]->bytes() / found[2].cast<uint64_t>()));
  }

  py::object hooks_, parameter_, tensor_, pieces_, is_storage_, ordered_dict_, torch_utils_;
  // Texts that stand in a pickle once, and are met again.
  const py::object storage_ = owned_object(PyUnicode_InternFromString("storage"));
  const py::object cpu_ = owned_object(PyUnicode_InternFromString("cpu"));
  const py::object latin1_ = owned_object(PyUnicode_InternFromString("latin1"));
  py::dict dispatch_table_;
  bool stream_;
  formats::PickleWriter out_;
  PickledValue made_;
  std::unordered_map<PyObject*, std::string> names_;
  std::unordered_map<PyObject*, uint32_t> memo_;
  std::unordered_map<std::string, size_t> records_;
  std::unordered_map<PyObject*, py::object> storage_ids_;
  std::vector<py::object> kept_;
};

}  // namespace

io::SourcePtr source_of_pieces(const py::handle& object) {
  std::vector<io::SourcePtr> parts;
  for (const py::handle part : object.attr("parts")) {
    if (py::isinstance<io::ByteSource>(part)) {
      parts.push_back(part.cast<io::SourcePtr>());
    } else {
      parts.push_back(std::make_shared<TensorSource>(THPVariable_Unpack(part.ptr())));
    }
  }
  return std::make_shared<io::JoinedSource>(std::move(parts));
}

PickledValue pickle_value(const py::object& value, const py::object& hooks, bool stream) {
  return ObjectPickler(hooks, stream).pickle(value);
}

}  // namespace ds::bindings
