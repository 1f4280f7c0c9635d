// Files of other formats: torch archives, safetensors headers, ranges of files. See formats/torch_archive.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>

#include "base/ranges.h"
#include "bindings/formats/pickle_objects.h"
#include "bindings/fs_path.h"
#include "bindings/registry.h"
#include "formats/format_error.h"
#include "formats/safetensors_header.h"
#include "formats/torch_archive.h"

namespace py = pybind11;

namespace ds::bindings {

using namespace ds::formats;

namespace {

using Identity = std::tuple<uint64_t, uint64_t, uint64_t, int64_t>;  // as byte_ranges.file_identity

Identity tuple_of(const FileIdentity& identity) {
  return {identity.device, identity.inode, identity.bytes, identity.changed_ns};
}

void raise(const char* module, const char* name, const char* text) {
  const py::object said = py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(text, std::strlen(text), "replace"));
  PyErr_SetObject(py::module_::import(module).attr(name).ptr(), said.ptr());
}

void translate_format_error(std::exception_ptr pending) {  // NOLINT(performance-unnecessary-value-param)
  try {
    if (pending) std::rethrow_exception(pending);
  } catch (const DamagedPickle& error) {
    raise("pickle", "UnpicklingError", error.what());
  } catch (const DamagedZip& error) {
    raise("zipfile", "BadZipFile", error.what());
  }
}

py::tuple safetensors_header(const ds::bindings::FsPath& path, const std::vector<std::string>& known,
                             const std::string& torch) {
  const CheckedFile file(path);
  const auto is_known = [&known](const Element& element) { return ds::contains(known, element.name); };
  const SafetensorsHeader header = read_safetensors_header(file, is_known, torch);
  py::list tensors;
  for (const SafetensorsEntry& entry : header.tensors)
    tensors.append(
        py::make_tuple(entry.name, std::string(entry.element->name), entry.shape, entry.offset, entry.bytes));
  py::dict metadata;
  for (const auto& [key, text] : header.metadata) metadata[py::str(key)] = text;
  return py::make_tuple(tensors, metadata, tuple_of(file.identity()));
}

}  // namespace

DS_BINDINGS(m) {
  py::module_ formats = m.def_submodule("formats", "The bytes of files.");
  py::register_exception_translator(translate_format_error);
  py::register_exception<DamagedSafetensors>(formats, "DamagedSafetensors", PyExc_ValueError);

  py::class_<TorchArchive>(formats, "TorchArchive")
      .def(py::init([](const ds::bindings::FsPath& path, const py::object& names) {
             return ds::bindings::refusing(names, [&] { return std::make_unique<TorchArchive>(path); });
           }),
           "path"_a, "names"_a)
      .def_property_readonly("swapped", &TorchArchive::swapped)
      .def_property_readonly("identity", [](const TorchArchive& self) { return tuple_of(self.file().identity()); })
      // names: plain_classes.Names; values: {"module.name": what is called instead}; storages: prepare(), tensor().
      .def("load", &ds::bindings::load_archive, "names"_a, "values"_a, "storages"_a);

  formats.def("safetensors_header", &safetensors_header, "path"_a, "dtypes"_a, "torch"_a);
  formats.def(
      "read_ranges",
      [](const ds::bindings::FsPath& path, const Identity& identity,
         const std::vector<std::tuple<uint64_t, uint64_t, uintptr_t>>& ranges, int threads) {
        std::vector<ds::io::Range> wanted;
        wanted.reserve(ranges.size());
        for (const auto& [offset, bytes, to] : ranges) wanted.push_back({offset, bytes, reinterpret_cast<void*>(to)});
        const auto& [device, inode, size, changed] = identity;
        py::gil_scoped_release released;
        read_ranges(path, {device, inode, size, changed}, wanted, threads);
      },
      "path"_a, "identity"_a, "ranges"_a, "threads"_a);
}

}  // namespace ds::bindings
