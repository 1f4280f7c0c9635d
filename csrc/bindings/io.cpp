// Files of checkpoints: writers that take addresses, readers, the operations on names. See checkpoint/file_writer.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/registry.h"
#include "io/crc32.h"
#include "io/file_error.h"
#include "io/file_stream.h"
#include "io/files.h"
#include "io/host_memory.h"
#include "io/range_reader.h"
#include "io/zip_part.h"
#include "io/zip_writer.h"

namespace py = pybind11;
using namespace ds::io;

namespace {

using Released = py::call_guard<py::gil_scoped_release>;

py::tuple pair(const Sum& sum) { return py::make_tuple(sum.bytes, sum.crc32); }

// What Tensor.data_ptr() says.
char* pointer(uintptr_t address) { return reinterpret_cast<char*>(address); }  // NOLINT(performance-no-int-to-ptr)

std::vector<ZipEntry> entries_of(const std::vector<std::pair<std::string, uint64_t>>& pairs) {
  std::vector<ZipEntry> entries;
  entries.reserve(pairs.size());
  for (const auto& [name, bytes] : pairs) entries.push_back({name, bytes});
  return entries;
}

std::vector<Range> ranges_of(const std::vector<std::tuple<uint64_t, uint64_t, uintptr_t>>& triples) {
  std::vector<Range> ranges;
  ranges.reserve(triples.size());
  for (const auto& [offset, bytes, to] : triples) ranges.push_back({offset, bytes, pointer(to)});
  return ranges;
}

size_t checked(const ZipLayout& layout, size_t entry) {
  if (entry >= layout.entries().size()) throw py::index_error("no such entry");
  return entry;
}

StreamOptions options_of(size_t buffer_bytes, int buffers, int threads, bool direct, bool sync) {
  StreamOptions options;
  options.buffer_bytes = buffer_bytes;
  options.buffers = buffers;
  options.threads = threads;
  options.direct = direct;
  options.sync = sync;
  return options;
}

// Memory of bytes, bytearray, memoryview and arrays.
template <typename Writer>
auto write_buffer(Writer& writer, const py::buffer& data) {
  const py::buffer_info info = data.request();
  if (!PyBuffer_IsContiguous(info.view(), 'C')) throw py::value_error("the memory to write must be contiguous");
  py::gil_scoped_release released;
  return writer.write(info.ptr, static_cast<size_t>(info.size * info.itemsize));
}

void translate(std::exception_ptr pending) {  // NOLINT(performance-unnecessary-value-param): pybind11 asks for it
  try {
    if (pending) std::rethrow_exception(pending);
  } catch (const FileError& e) {
    const py::object error = py::module_::import("builtins").attr("OSError")(e.code(), e.what());
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  }
}

}  // namespace

DS_BINDINGS(m) {
  py::module_ io = m.def_submodule("io", "Files of checkpoints.");
  py::register_exception_translator(translate);

  py::class_<Files, std::shared_ptr<Files>>(io, "Files")
      .def(py::init<const std::string&>(), py::arg("fault") = "")
      .def(
          "inject", [](Files& self, const std::string& order) { self.faults().arm(order); }, py::arg("fault"))
      .def("sync_directory", &Files::sync_directory, py::arg("path"), Released())
      .def("rename", &Files::rename, py::arg("source"), py::arg("target"), Released())
      .def("exchange", &Files::exchange, py::arg("a"), py::arg("b"), Released());

  py::class_<FileStream>(io, "FileStream")
      .def(py::init([](Files& files, const std::string& path, uint64_t expected_bytes, size_t buffer_bytes, int buffers,
                       int threads, bool direct, bool sync) {
             const StreamOptions options = options_of(buffer_bytes, buffers, threads, direct, sync);
             py::gil_scoped_release released;
             return std::make_unique<FileStream>(files, path, expected_bytes, options);
           }),
           py::keep_alive<1, 2>(), py::arg("files"), py::arg("path"), py::arg("expected_bytes"),
           py::arg("buffer_bytes"), py::arg("buffers"), py::arg("threads"), py::arg("direct"), py::arg("sync"))
      .def("write", [](FileStream& self, const py::buffer& data) { return write_buffer(self, data); })
      .def(
          "write_memory",
          [](FileStream& self, uintptr_t address, size_t bytes) { return self.write(pointer(address), bytes); },
          py::arg("address"), py::arg("bytes"), Released())
      .def("abandon", &FileStream::abandon, Released())
      .def("finish",
           [](FileStream& self) {
             Sum sum;
             {
               py::gil_scoped_release released;
               sum = self.finish();
             }
             return pair(sum);
           })
      .def_property_readonly("position", &FileStream::position)
      .def_property_readonly("direct", &FileStream::direct)
      .def_property_readonly("method", &FileStream::method);

  py::class_<ZipWriter>(io, "ZipWriter")
      .def(py::init([](Files& files, const std::string& path,
                       const std::vector<std::pair<std::string, uint64_t>>& entries, size_t buffer_bytes, int buffers,
                       int threads, bool direct, bool sync) {
             const StreamOptions options = options_of(buffer_bytes, buffers, threads, direct, sync);
             std::vector<ZipEntry> made = entries_of(entries);
             py::gil_scoped_release released;
             return std::make_unique<ZipWriter>(files, path, std::move(made), options);
           }),
           py::keep_alive<1, 2>(), py::arg("files"), py::arg("path"), py::arg("entries"), py::arg("buffer_bytes"),
           py::arg("buffers"), py::arg("threads"), py::arg("direct"), py::arg("sync"))
      .def("write", [](ZipWriter& self, const py::buffer& data) { write_buffer(self, data); })
      // Several pieces of memory, one after the other, in one call.
      .def(
          "write_memory",
          [](ZipWriter& self, const std::vector<std::pair<uintptr_t, size_t>>& pieces) {
            py::gil_scoped_release released;
            for (const auto& [address, bytes] : pieces) self.write(pointer(address), bytes);
          },
          py::arg("pieces"))
      .def("offset",
           [](const ZipWriter& self, size_t entry) {
             if (entry >= self.layout().entries().size()) throw py::index_error("no such entry");
             return self.layout().data_offset(entry);
           })
      .def("abandon", &ZipWriter::abandon, Released())
      .def("finish",
           [](ZipWriter& self) {
             Sum sum;
             {
               py::gil_scoped_release released;
               sum = self.finish();
             }
             return pair(sum);
           })
      .def_property_readonly("crc32", [](const ZipWriter& self) { return self.crc32(); })
      .def_property_readonly("method", &ZipWriter::method);

  py::class_<ZipLayout>(io, "ZipLayout")
      .def(py::init([](const std::vector<std::pair<std::string, uint64_t>>& entries) {
             return std::make_unique<ZipLayout>(entries_of(entries));
           }),
           py::arg("entries"))
      .def_property_readonly("file_bytes", &ZipLayout::file_bytes)
      .def("header_offset",
           [](const ZipLayout& self, size_t entry) { return self.header_offset(checked(self, entry)); })
      .def("data_offset", [](const ZipLayout& self, size_t entry) { return self.data_offset(checked(self, entry)); })
      .def("local_header",
           [](const ZipLayout& self, size_t entry) { return py::bytes(self.local_header(checked(self, entry))); })
      .def("descriptor", [](const ZipLayout& self, size_t entry,
                            uint32_t crc32) { return py::bytes(self.descriptor(checked(self, entry), crc32)); })
      .def("directory", [](const ZipLayout& self, const std::vector<uint32_t>& crc32) {
        if (crc32.size() != self.entries().size()) throw py::value_error("one checksum for each entry");
        return py::bytes(self.directory(crc32));
      });

  py::class_<ZipPart>(io, "ZipPart")
      .def(py::init([](Files& files, const std::string& path,
                       const std::vector<std::pair<std::string, uint64_t>>& entries, uint64_t begin, uint64_t end,
                       size_t buffer_bytes, int buffers, int threads, bool direct, bool sync) {
             const StreamOptions options = options_of(buffer_bytes, buffers, threads, direct, sync);
             std::vector<ZipEntry> made = entries_of(entries);
             py::gil_scoped_release released;
             return std::make_unique<ZipPart>(files, path, std::move(made), begin, end, options);
           }),
           py::keep_alive<1, 2>())
      .def_property_readonly("runs",
                             [](const ZipPart& self) {
                               py::list found;
                               for (const ZipRun& run : self.runs())
                                 found.append(py::make_tuple(run.entry, run.offset, run.bytes));
                               return found;
                             })
      .def("write", [](ZipPart& self, const py::buffer& data) { write_buffer(self, data); })
      .def(
          "write_memory",
          [](ZipPart& self, const std::vector<std::pair<uintptr_t, size_t>>& pieces) {
            py::gil_scoped_release released;
            for (const auto& [address, bytes] : pieces) self.write(pointer(address), bytes);
          },
          py::arg("pieces"))
      .def_property_readonly("crc32", [](const ZipPart& self) { return self.crc32(); })
      .def("abandon", &ZipPart::abandon, Released())
      .def("finish", [](ZipPart& self) {
        Sum sum;
        {
          py::gil_scoped_release released;
          sum = self.finish();
        }
        return pair(sum);
      });

  // Offers its bytes as a buffer: memoryview, torch.frombuffer.
  py::class_<HostMemory>(io, "HostMemory", py::buffer_protocol())
      .def(py::init<size_t, int>(), py::arg("bytes"), py::arg("threads"), Released())
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
      py::arg("copies"), py::arg("threads"));

  io.def("crc32", [](const py::buffer& data) {
    const py::buffer_info info = data.request();
    return crc32_of(info.ptr, static_cast<size_t>(info.size * info.itemsize));
  });
  io.def("crc32_joined", &crc32_joined, py::arg("first"), py::arg("second"), py::arg("second_bytes"));
  io.attr("TO_THE_END") = kToTheEnd;
  io.def(
      "read_ranges",
      [](const std::string& path, const std::vector<std::tuple<uint64_t, uint64_t, uintptr_t>>& ranges, int threads) {
        const std::vector<Range> made = ranges_of(ranges);
        py::gil_scoped_release released;
        read_ranges(path, made, threads);
      },
      py::arg("path"), py::arg("ranges"), py::arg("threads"));
  io.def(
      "sum_ranges",
      [](const std::string& path, const std::vector<std::pair<uint64_t, uint64_t>>& ranges, int threads) {
        std::vector<Range> made;
        made.reserve(ranges.size());
        for (const auto& [offset, bytes] : ranges) made.push_back({offset, bytes, nullptr});
        py::gil_scoped_release released;
        return sum_ranges(path, made, threads);
      },
      py::arg("path"), py::arg("ranges"), py::arg("threads"));
}
