// Files of checkpoints: writers that take addresses, readers, the operations on names. See checkpoint/file_writer.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/fs_path.h"
#include "bindings/registry.h"
#include "io/file_error.h"
#include "io/files.h"
#include "io/memory/host_memory.h"
#include "io/folders/paths.h"
#include "io/range_reader.h"

namespace py = pybind11;

namespace ds::bindings {

using namespace ds::io;

namespace {

using Released = py::call_guard<py::gil_scoped_release>;

// The address that Tensor.data_ptr() returns.
char* pointer(uintptr_t address) { return reinterpret_cast<char*>(address); }  // NOLINT(performance-no-int-to-ptr)

// A name as Python's os.fsencode makes bytes of it; what no file can be called is refused as any other bad name.
std::string name_bytes(const py::object& name, const std::string& source) {
  PyObject* made = nullptr;
  const char* why = "is not text";
  if (PyUnicode_Check(name.ptr())) {
    made = PyUnicode_EncodeFSDefault(name.ptr());
    why = "cannot be the name of a file";
  }
  if (made == nullptr) {
    PyErr_Clear();
    ds::fail(ds::ErrorKind::kValue, source, " has the name ",
             py::str(py::module_::import("builtins").attr("ascii")(name)).cast<std::string>(), ", which ", why,
             ": it is damaged. Nothing was done with that name");
  }
  return py::reinterpret_steal<py::bytes>(made);
}

// The text of an object, for messages: bytes of a path that are not UTF-8 are escaped.
std::string printable(const py::object& object) {
  return py::str(object).attr("encode")("utf-8", "backslashreplace").cast<std::string>();
}

// Returns the bytes of a path-like object: text or os.PathLike.
std::string folder_bytes(const py::object& folder) {
  return py::module_::import("os").attr("fsencode")(folder).cast<std::string>();
}

py::object decoded_path(const std::string& path) {
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(path.size())));
}

void translate(std::exception_ptr pending) {  // NOLINT(performance-unnecessary-value-param): pybind11 asks for it
  try {
    if (pending) std::rethrow_exception(pending);
  } catch (const FileError& e) {
    const py::object error =
        py::module_::import("builtins").attr("OSError")(e.code(), decoded_path(std::string(e.what())));
    error.attr("path") = decoded_path(e.path());
    error.attr("offset") = e.offset();
    error.attr("bytes") = e.bytes();
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  }
}

}  // namespace

DS_BINDINGS(m) {
  py::module_ io = m.def_submodule("io", "Files of checkpoints.");
  py::register_exception_translator(translate);

  py::class_<Files, std::shared_ptr<Files>>(io, "Files")
      .def(py::init<const std::string&>(), "fault"_a = "")
      .def(
          "inject", [](Files& self, const std::string& order) { self.inject(order); }, "fault"_a)
      .def(
          "sync_directory", [](Files& self, const FsPath& path) { self.sync_directory(path); }, "path"_a, Released())
      .def(
          "rename", [](Files& self, const FsPath& source, const FsPath& target) { self.rename(source, target); },
          "source"_a, "target"_a, Released())
      .def(
          "exchange", [](Files& self, const FsPath& a, const FsPath& b) { return self.exchange(a, b); }, "a"_a, "b"_a,
          Released());

  // Offers its bytes as a buffer: memoryview, torch.frombuffer.
  py::class_<HostMemory>(io, "HostMemory", py::buffer_protocol())
      .def(py::init<size_t, int>(), "bytes"_a, "threads"_a, Released())
      .def_property_readonly("bytes", &HostMemory::bytes)
      .def_buffer([](HostMemory& self) {
        return py::buffer_info(self.data(), 1, py::format_descriptor<uint8_t>::format(), 1, {self.bytes()}, {1});
      });
  io.def(
      "copy_all",
      [](const std::vector<std::tuple<uintptr_t, uintptr_t, size_t>>& triples, int threads) {
        std::vector<Copy> copies;
        copies.reserve(triples.size());
        for (const auto& [from, to, bytes] : triples)
          copies.push_back({pointer(from), reinterpret_cast<void*>(to), bytes});
        py::gil_scoped_release released;
        copy_all(copies, threads);
      },
      "copies"_a, "threads"_a);

  io.def(
      "path_below",
      [](const py::object& folder, const py::object& name, const py::object& source, const std::string& kind) {
        const std::string said = printable(source);
        return decoded_path(path_below(folder_bytes(folder), name_bytes(name, said), said, name_kind(kind)));
      },
      "folder"_a, "name"_a, "source"_a, "kind"_a = "path");
  io.def(
      "remove_below",
      [](const py::object& folder, const py::object& name, const py::object& source) {
        const std::string said = printable(source);
        return remove_below(folder_bytes(folder), name_bytes(name, said), said);
      },
      "folder"_a, "name"_a, "source"_a);
  io.attr("TO_THE_END") = kToTheEnd;
  io.def(
      "sum_ranges",
      [](const FsPath& path, const std::vector<std::pair<uint64_t, uint64_t>>& ranges, int threads) {
        std::vector<Range> made;
        made.reserve(ranges.size());
        for (const auto& [offset, bytes] : ranges) made.push_back({offset, bytes, nullptr});
        py::gil_scoped_release released;
        return sum_ranges(path, made, threads);
      },
      "path"_a, "ranges"_a, "threads"_a);
}

}  // namespace ds::bindings
