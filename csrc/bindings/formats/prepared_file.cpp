// Files of checkpoints before they are written, and sources of their bytes. See checkpoint/write/file_writer.py.
#include "formats/prepared_file.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "base/error.h"
#include "base/ranges.h"
#include "base/sizes.h"
#include "bindings/formats/object_pickler.h"
#include "bindings/fs_path.h"
#include "bindings/registry.h"
#include "bindings/formats/tensor_source.h"
#include "bindings/torch_types.h"
#include "formats/shared_archive.h"
#include "io/crc32.h"

namespace py = pybind11;

namespace ds::bindings {

using formats::FileRecord;
using formats::NamedTensor;
using io::ByteSource;
using io::SourcePtr;

namespace {

constexpr uint64_t kMostStaging = 32 << 20, kLeastStaging = 4096;

// (bytes, CRC-32, [(name, dtype, shape, offset, bytes, CRC-32)])
py::tuple record_tuple(const FileRecord& record) {
  py::list tensors;
  for (const formats::TensorRecord& tensor : record.tensors) {
    tensors.append(py::make_tuple(tensor.name, tensor.dtype, tensor.shape, tensor.offset, tensor.bytes, tensor.crc32));
  }
  return py::make_tuple(record.bytes, record.crc32, tensors);
}

const at::Tensor& tensor_of(const py::object& object) {
  if (!THPVariable_Check(object.ptr())) throw py::type_error("expected a torch.Tensor");
  return THPVariable_Unpack(object.ptr());
}

void copy_to(const ByteSource& source, const py::object& memory) {
  const at::Tensor& target = tensor_of(memory);
  if (!target.is_cpu() || !target.is_contiguous() || target.nbytes() != source.bytes()) {
    throw py::value_error("a source is copied into contiguous memory of its size on the host");
  }
  py::gil_scoped_release released;
  source.copy_range(static_cast<char*>(target.data_ptr()), 0, source.bytes());
}

std::vector<std::pair<uintptr_t, uint64_t>> pieces_of(const ByteSource& source) {
  if (!source.in_place()) throw py::value_error("the pieces of a source that is not in memory are only passed on");
  std::vector<std::pair<uintptr_t, uint64_t>> found;
  io::Staging none;
  source.each(none, [&](const void* data, uint64_t bytes) {
    if (bytes > 0) found.emplace_back(reinterpret_cast<uintptr_t>(data), bytes);
  });
  return found;
}

// The CRC-32 of all of it; and hashlib's object `digest`, where there is one, gets the bytes.
uint32_t checksum_of(const ByteSource& source, const py::object& digest) {
  io::Staging staging;
  uint32_t sum = 0;
  source.each(staging, [&](const void* data, uint64_t bytes) {
    sum = io::crc32_of(data, bytes, sum);
    if (digest.is_none()) return;
    digest.attr("update")(py::memoryview::from_memory(data, static_cast<py::ssize_t>(bytes)));
  });
  return sum;
}

// The fields of file_writer.WriterOptions that writers need: (bytes of a buffer, buffers, threads, O_DIRECT, fsync,
// staged, mapped).
using Options = std::tuple<size_t, int, int, bool, bool, bool, bool>;

template <typename File>
auto write_file(const File& file, io::Files& files, const bindings::FsPath& path, const Options& given) {
  io::StreamOptions options;
  io::Staging staging;
  std::tie(options.buffer_bytes, options.buffers, options.threads, options.direct, options.sync, staging.always,
           options.mapped) = given;
  staging.bytes = std::max(kLeastStaging, std::min<uint64_t>(kMostStaging, options.buffer_bytes));
  py::gil_scoped_release released;
  return file.write(files, path, options, staging);
}

using Entries = std::vector<std::pair<std::string, uint64_t>>;

std::vector<io::ZipEntry> entries_of(const Entries& pairs) {
  std::vector<io::ZipEntry> made;
  for (const auto& [name, bytes] : pairs) made.push_back({name, bytes});
  return made;
}

// (entry, offset, bytes, CRC-32)
using Run = std::tuple<size_t, uint64_t, uint64_t, uint32_t>;

std::shared_ptr<formats::PreparedFile> prepare_torch(const py::object& value, const py::object& hooks) {
  bindings::PickledValue made = bindings::pickle_value(value, hooks, false);
  return std::make_shared<formats::TorchZipFile>(std::move(made.bytes), std::move(made.keys), std::move(made.sources),
                                                 std::move(made.tensors));
}

// head: magic, version and system, as torch.save wrote them before the structure.
std::shared_ptr<formats::PreparedFile> prepare_stream(const py::object& value, const py::object& hooks,
                                                      const py::list& head) {
  bindings::PickledValue made = bindings::pickle_value(value, hooks, true);
  std::string pickles;
  for (const py::handle part : head) {
    pickles += bindings::pickle_value(py::reinterpret_borrow<py::object>(part), hooks, true).bytes;
  }
  pickles += made.bytes + bindings::pickle_value(py::cast(made.keys), hooks, true).bytes;
  return std::make_shared<formats::TorchStreamFile>(std::move(pickles), std::move(made.counts), std::move(made.sources),
                                                    std::move(made.tensors));
}

std::pair<NamedTensor, SourcePtr> plain_tensor(const py::handle& key, const py::object& object, size_t index) {
  const std::string said = py::repr(key);
  if (!py::isinstance<py::str>(key) || key.cast<std::string>() == "__metadata__") {
    fail(ErrorKind::kValue, "a tensor in a safetensors file needs a name of text other than __metadata__, got ", said);
  }
  const std::string dtype = py::str(object.attr("dtype"));
  NamedTensor named{key.cast<std::string>(), dtype.substr(dtype.rfind('.') + 1), {}, index};
  if (py::hasattr(object, "parts")) {  // a TensorOfPieces
    named.shape = object.attr("shape").cast<std::vector<int64_t>>();
    return {std::move(named), bindings::source_of_pieces(object)};
  }
  const at::Tensor& tensor = tensor_of(object);
  if (tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_meta()) {
    fail(ErrorKind::kValue, "the tensor ", said, " (", std::string(py::str(object.attr("layout"))), ", ",
         tensor.device().str(),
         ") is not a dense tensor with elements: safetensors has no form for it; make it dense (to_dense(), "
         "dequantize()) or leave it out");
  }
  const auto source = std::make_shared<TensorSource>(tensor, true);
  named.shape = source->shape();
  return {std::move(named), source};
}

std::shared_ptr<formats::PreparedFile> prepare_safetensors(const py::dict& tensors, const py::object& metadata) {
  std::vector<std::pair<NamedTensor, SourcePtr>> made;
  std::vector<size_t> widths, order;
  for (const auto& [key, tensor] : tensors) {
    made.push_back(plain_tensor(key, py::reinterpret_borrow<py::object>(tensor), made.size()));
    widths.push_back(c10::elementSize(*bindings::optional_dtype(tensor.attr("dtype"))));
    order.push_back(order.size());
  }
  sort(order, [&](size_t a, size_t b) {
    return std::tie(widths[b], made[a].first.name) < std::tie(widths[a], made[b].first.name);
  });
  std::vector<NamedTensor> named;
  std::vector<SourcePtr> sources;
  for (const size_t i : order) {
    named.push_back(std::move(made[i].first));
    named.back().source = sources.size();
    sources.push_back(std::move(made[i].second));
  }
  std::vector<std::pair<std::string, std::string>> texts;
  for (const auto& [key, text] : metadata.is_none() ? py::dict() : py::dict(metadata)) {
    if (!py::isinstance<py::str>(key) || !py::isinstance<py::str>(text)) {
      fail(ErrorKind::kValue, "safetensors metadata maps text to text only; ", std::string(py::repr(key)),
           " is not so: pass it as JSON text");
    }
    texts.emplace_back(key.cast<std::string>(), text.cast<std::string>());
  }
  return std::make_shared<formats::SafetensorsFile>(std::move(named), std::move(sources), texts);
}

}  // namespace

DS_BINDINGS(m) {
  py::module_ prepared = m.def_submodule("prepared", "Files of checkpoints before they are written.");
  py::class_<ByteSource, SourcePtr>(prepared, "ByteSource")
      .def_property_readonly("bytes", &ByteSource::bytes)
      .def("in_place", &ByteSource::in_place)
      .def_property_readonly("on_device", &ByteSource::on_device)
      .def("pieces", &pieces_of)
      .def("copy_to", &copy_to, "memory"_a)
      .def("crc32", &checksum_of, "digest"_a = py::none());
  // The source of a torch.Tensor.
  prepared.def(
      "tensor_source",
      [](const py::object& tensor, bool row_major) -> SourcePtr {
        return std::make_shared<TensorSource>(tensor_of(tensor), row_major);
      },
      "tensor"_a, "row_major"_a = false);
  // The source of [(address, bytes)] in memory that `owner` keeps.
  prepared.def(
      "memory_source",
      [](const std::vector<std::pair<uintptr_t, uint64_t>>& pieces, const py::object& owner) -> SourcePtr {
        std::vector<io::MemoryPiece> made;
        // NOLINTNEXTLINE(performance-no-int-to-ptr)
        for (const auto& [address, bytes] : pieces) made.push_back({reinterpret_cast<const char*>(address), bytes});
        const auto let_go = [](void* kept) {
          const py::gil_scoped_acquire locked;
          Py_DECREF(static_cast<PyObject*>(kept));
        };
        return std::make_shared<io::MemorySource>(std::move(made),
                                                  std::shared_ptr<void>(owner.inc_ref().ptr(), let_go));
      },
      "pieces"_a, "owner"_a);
  prepared.def(
      "sliced_source",
      [](SourcePtr source, uint64_t begin, uint64_t end) -> SourcePtr {
        return std::make_shared<io::SlicedSource>(std::move(source), begin, end);
      },
      "source"_a, "begin"_a, "end"_a);

  py::class_<formats::PreparedFile, std::shared_ptr<formats::PreparedFile>>(prepared, "PreparedFile")
      .def_readwrite("sources", &formats::PreparedFile::sources)
      .def(
          "write",
          [](const formats::PreparedFile& self, io::Files& files, const bindings::FsPath& path,
             const Options& options) { return record_tuple(write_file(self, files, path, options)); },
          "files"_a, "path"_a, "options"_a);
  py::class_<formats::TorchZipFile, formats::PreparedFile, std::shared_ptr<formats::TorchZipFile>>(prepared,
                                                                                                   "TorchZipFile")
      .def_property_readonly("texts",
                             [](const formats::TorchZipFile& self) {
                               py::list found;
                               for (const std::string& text : self.texts()) found.append(py::bytes(text));
                               return found;
                             })
      .def("entries", [](const formats::TorchZipFile& self) {
        std::vector<std::pair<std::string, uint64_t>> found;
        for (const io::ZipEntry& entry : self.entries()) found.emplace_back(entry.name, entry.bytes);
        return found;
      });
  prepared.def(
      "bytes_file",
      [](const py::buffer& data) -> std::shared_ptr<formats::PreparedFile> {
        const py::buffer_info info = data.request();
        if (!PyBuffer_IsContiguous(info.view(), 'C')) throw py::value_error("the memory to write must be contiguous");
        const auto* bytes = static_cast<const char*>(info.ptr);
        return std::make_shared<formats::BytesFile>(std::string(
            bytes,
            sizes::product("bytes of a buffer", static_cast<size_t>(info.size), static_cast<size_t>(info.itemsize))));
      },
      "data"_a);
  // hooks: file_writer.PicklerHooks.
  prepared.def("torch_file", &prepare_torch, "value"_a, "hooks"_a);
  prepared.def("stream_file", &prepare_stream, "value"_a, "hooks"_a, "head"_a);
  prepared.def("safetensors_file", &prepare_safetensors, "tensors"_a, "metadata"_a);

  using formats::ArchiveCuts;
  using formats::ArchivePart;
  using formats::TorchZipFile;
  py::class_<ArchiveCuts>(prepared, "ArchiveCuts")
      .def(py::init([](const Entries& entries, size_t texts, size_t count) {
             return ArchiveCuts(entries_of(entries), texts, count);
           }),
           "entries"_a, "texts"_a, "count"_a);
  py::class_<ArchivePart>(prepared, "ArchivePart")
      .def(py::init<const TorchZipFile&, ArchiveCuts, size_t>(), "file"_a, "cuts"_a, "index"_a)
      .def_property_readonly("bytes", &ArchivePart::bytes)
      .def_readwrite("sources", &ArchivePart::sources)
      .def(
          "write",
          [](const ArchivePart& self, io::Files& files, const bindings::FsPath& path, const Options& options) {
            std::vector<Run> found;
            for (const formats::WrittenRun& run : write_file(self, files, path, options)) {
              found.emplace_back(run.entry, run.offset, run.bytes, run.crc32);
            }
            return found;
          },
          "files"_a, "path"_a, "options"_a);
  prepared.def(
      "complete_archive",
      [](const bindings::FsPath& path, const TorchZipFile& file, const ArchiveCuts& cuts,
         const std::vector<Run>& runs) {
        std::vector<formats::WrittenRun> made;
        for (const auto& [entry, offset, bytes, crc32] : runs) made.push_back({entry, offset, bytes, crc32});
        FileRecord record;
        {
          py::gil_scoped_release released;
          record = complete_archive(path, file, cuts, std::move(made));
        }
        return record_tuple(record);
      },
      "path"_a, "file"_a, "cuts"_a, "runs"_a);
}

}  // namespace ds::bindings
