// The ops async_io, gds and pin_memory: tensors in files. See ops/op_builder/prebuilt/{async_io,gds,pin_memory}.py.
#include <pybind11/stl.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/blocking_region.h"
#include "base/error.h"
#include "base/sizes.h"
#include "bindings/registry.h"
#include "bindings/torch_types.h"
#include "storage/buffered_writer.h"
#include "storage/tensor_io.h"

namespace py = pybind11;

namespace ds::bindings {

using ds::storage::BufferedWriter;
using ds::storage::TensorIo;

namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;
using HandlePtr = std::shared_ptr<TensorIo>;
using FileOffset = TensorIo::FileOffset;
using How = TensorIo::How;

// Workers that drop a tensor may need the interpreter's lock, which the thread that drops the handle holds.
template <typename T>
std::shared_ptr<T> freed_without_lock(T* made) {
  return std::shared_ptr<T>(made, [](T* gone) { in_blocking_region([gone] { delete gone; }); });
}

std::string text_of(const char* variable) {
  const char* text = ::getenv(variable);
  return text == nullptr ? "" : text;
}

std::string path_of(const py::object& path) {
  return py::cast<std::string>(py::module_::import("os").attr("fsdecode")(path));
}

template <typename Move>
int at_offset(const py::object& filename, int64_t offset, How how, const Move& move) {
  if (offset < 0) throw py::value_error("file_offset is 0 or more, got " + std::to_string(offset));
  FileOffset file;
  if (PyLong_Check(filename.ptr())) {
    file.number = py::cast<int>(filename);
    if (file.number < 0) throw py::value_error("fd is an open file's number, got " + std::to_string(file.number));
  } else {
    file.path = path_of(filename);
  }
  file.offset = static_cast<uint64_t>(offset);
  py::gil_scoped_release released;
  move(file);
  return how == How::kBackground ? 0 : 1;
}

int read(TensorIo& self, const at::Tensor& buffer, const py::object& filename, bool validate, How how, int64_t offset) {
  return at_offset(filename, offset, how, [&](const FileOffset& file) { self.read(buffer, file, how, validate); });
}

int write(TensorIo& self, const at::Tensor& buffer, const py::object& filename, bool validate, How how,
          int64_t offset) {
  return at_offset(filename, offset, how, [&](const FileOffset& file) { self.write(buffer, file, how, validate); });
}

io::TransferOptions options_of(size_t block_size, int queue_depth, bool single_submit, bool overlap_events) {
  io::TransferOptions options;
  options.block_bytes = block_size;
  options.queue_depth = queue_depth;
  options.single_submit = single_submit;
  options.overlap_events = overlap_events;
  options.backend = io::backend_named(text_of("DS_IO_BACKEND"));
  return options;
}

// The part that handles of files and handles of devices share.
template <typename Class>
void add_methods(Class& handle) {
  const auto offset = "file_offset"_a = 0;
  const auto validate = "validate"_a = false;
  handle
      .def(
          "read",
          [](TensorIo& self, const at::Tensor& buffer, const py::object& filename, bool validate, int64_t offset) {
            return read(self, buffer, filename, validate, How::kAlone, offset);
          },
          "buffer"_a, "filename"_a, validate, offset, "Fills a tensor by the calling thread alone.")
      .def(
          "write",
          [](TensorIo& self, const at::Tensor& buffer, const py::object& filename, bool validate, int64_t offset) {
            return write(self, buffer, filename, validate, How::kAlone, offset);
          },
          "buffer"_a, "filename"_a, validate, offset, "Writes a tensor by the calling thread alone.")
      .def(
          "pread",
          [](TensorIo& self, const at::Tensor& buffer, const py::object& filename, bool validate, bool background,
             int64_t offset) {
            return read(self, buffer, filename, validate, background ? How::kBackground : How::kWait, offset);
          },
          "buffer"_a, "filename"_a, validate, "async"_a = false, offset, "Fills a tensor by all threads of the handle.")
      .def(
          "pwrite",
          [](TensorIo& self, const at::Tensor& buffer, const py::object& filename, bool validate, bool background,
             int64_t offset) {
            return write(self, buffer, filename, validate, background ? How::kBackground : How::kWait, offset);
          },
          "buffer"_a, "filename"_a, validate, "async"_a = false, offset,
          "Writes a tensor by all threads of the handle.")
      .def(
          "sync_pread",
          [](TensorIo& self, const at::Tensor& buffer, const py::object& filename, int64_t offset) {
            return read(self, buffer, filename, false, How::kWait, offset);
          },
          "buffer"_a, "filename"_a, offset, "pread that waits; returns 1.")
      .def(
          "sync_pwrite",
          [](TensorIo& self, const at::Tensor& buffer, const py::object& filename, int64_t offset) {
            return write(self, buffer, filename, false, How::kWait, offset);
          },
          "buffer"_a, "filename"_a, offset, "pwrite that waits; returns 1.")
      .def(
          "async_pread",
          [](TensorIo& self, const at::Tensor& buffer, const py::object& filename, int64_t offset) {
            return read(self, buffer, filename, false, How::kBackground, offset);
          },
          "buffer"_a, "filename"_a, offset, "pread that returns 0 at once; wait() ends it.")
      .def(
          "async_pwrite",
          [](TensorIo& self, const at::Tensor& buffer, int fd, int64_t offset) {
            return write(self, buffer, py::int_(fd), false, How::kBackground, offset);
          },
          "buffer"_a, "fd"_a, offset, "To a file that stays open until wait() has returned.")
      .def(
          "async_pwrite",
          [](TensorIo& self, const at::Tensor& buffer, const py::object& filename, int64_t offset) {
            return write(self, buffer, filename, false, How::kBackground, offset);
          },
          "buffer"_a, "filename"_a, offset, "pwrite that returns 0 at once; wait() ends it.")
      .def("wait", &TensorIo::wait, Unlocked(),
           "Waits for all asynchronous operations; returns how many ended since the last call, raises the first error.")
      .def("pending", &TensorIo::pending, Unlocked(), "Asynchronous operations that no wait() has told of.")
      .def("get_block_size", [](const TensorIo& self) { return self.options().block_bytes; })
      .def("get_queue_depth", [](const TensorIo& self) { return self.options().queue_depth; })
      .def("get_single_submit", [](const TensorIo& self) { return self.options().single_submit; })
      .def("get_overlap_events", [](const TensorIo& self) { return self.options().overlap_events; })
      .def("get_intra_op_parallelism", &TensorIo::threads)
      .def("get_alignment", [](const TensorIo&) { return TensorIo::alignment(); })
      .def("new_cpu_locked_tensor", &TensorIo::new_locked, "num_elem"_a, "example_tensor"_a, Unlocked(),
           "A page-locked tensor of num_elem elements with the dtype of the example.")
      .def("free_cpu_locked_tensor", &TensorIo::free_locked, "tensor"_a, Unlocked(),
           "Unlocks its memory, which stays valid as long as a tensor uses it; False where it is of no pool.")
      .def("is_pinned", &TensorIo::is_pinned, "tensor"_a, Unlocked(),
           "Whether transfers need no look for its pages: also views, and buffers of other handles.");
}

// The same object, made with cuFile: a class of its own for Python.
struct GdsHandle : TensorIo {
  using TensorIo::TensorIo;
};

}  // namespace

DS_BINDINGS(m) {
  py::module_ aio = m.def_submodule("aio", "Tensors in files.");
  // One pool and one counter of faults for a process; the module has them.
  const auto pool = std::make_shared<io::LockedPool>();
  const auto files = std::make_shared<io::Files>(text_of("DS_IO_FAULT"));

  py::class_<io::LockedPool, std::shared_ptr<io::LockedPool>>(aio, "LockedPool")
      .def(
          "new_tensor",
          [](const std::shared_ptr<io::LockedPool>& self, int64_t numel, const py::object& dtype) {
            const auto type = bindings::optional_dtype(dtype).value_or(at::kByte);
            py::gil_scoped_release released;
            return storage::locked_tensor(self, numel, type);
          },
          "num_elem"_a, "dtype"_a)
      .def("release", [](io::LockedPool& self,
                         const at::Tensor& tensor) { return tensor.is_cpu() && self.release(tensor.data_ptr()); })
      .def("holds",
           [](const io::LockedPool& self, const at::Tensor& tensor) {
             return tensor.is_cpu() && self.holds(tensor.data_ptr(), tensor.nbytes());
           })
      .def_property_readonly("locked_bytes", &io::LockedPool::locked_bytes)
      .def_property_readonly("peak_bytes", &io::LockedPool::peak_bytes)
      .def_property_readonly("blocks", &io::LockedPool::blocks);
  aio.attr("pool") = pool;
  aio.def(
      "inject", [files](const std::string& order) { files->inject(order); }, "fault"_a);
  aio.def(
      "backend",
      [files](const std::string& folder) {
        const io::Backend wanted = io::backend_named(text_of("DS_IO_BACKEND"));
        const std::string path = folder + "/.ds_io_probe." + std::to_string(::getpid());
        py::gil_scoped_release released;
        std::string name;
        {
          io::BlockFile file(*files, path, io::BlockFile::Mode::kWrite);
          ::unlink(path.c_str());
          name = io::open_async(*files, file.direct(), path, file.has_direct(), 1, {wanted, false, 1})->name();
          if (name == "pwrite") name = "threads";
          if (!file.has_direct()) name += ", without O_DIRECT";
        }
        return name;
      },
      "folder"_a, "What reads and writes files in this folder.");

  const auto block_size = "block_size"_a = 1 << 20;
  const auto queue_depth = "queue_depth"_a = 128;
  const auto single_submit = "single_submit"_a = false;
  const auto overlap_events = "overlap_events"_a = false;
  const auto parallelism = "intra_op_parallelism"_a = 1;

  aio.def(
      "gds_error",
      [] {
        try {
          io::CuFile::open();
        } catch (const ds::Error& error) {
          return std::string(error.what());
        }
        return std::string();
      },
      Unlocked(), "Why gds_handle() cannot be made here; empty where it can.");

  py::class_<TensorIo, HandlePtr> handle(aio, "aio_handle", "Reads and writes tensors beside the computation.");
  handle.def(py::init([pool, files](size_t block_size, int queue_depth, bool single_submit, bool overlap_events,
                                    int intra_op_parallelism) {
               const auto options = options_of(block_size, queue_depth, single_submit, overlap_events);
               return freed_without_lock(new TensorIo(files, pool, options, intra_op_parallelism));
             }),
             block_size, queue_depth, single_submit, overlap_events, parallelism);
  add_methods(handle);

  py::class_<GdsHandle, TensorIo, std::shared_ptr<GdsHandle>> device(
      aio, "gds_handle", "The same for tensors of a GPU, without the host's memory.");
  device
      .def(py::init([pool, files](size_t block_size, int queue_depth, bool single_submit, bool overlap_events,
                                  int intra_op_parallelism) {
             const auto options = options_of(block_size, queue_depth, single_submit, overlap_events);
             return freed_without_lock(new GdsHandle(files, pool, options, intra_op_parallelism, io::CuFile::open()));
           }),
           block_size, queue_depth, single_submit, overlap_events, parallelism)
      .def("new_pinned_device_tensor", &TensorIo::new_device, "num_elem"_a, "example_tensor"_a, Unlocked(),
           "A tensor on the example's device, registered with cuFile.")
      .def("free_pinned_device_tensor", &TensorIo::unpin_device, "tensor"_a, Unlocked(),
           "Ends its registration; its memory goes with the last tensor that uses it.")
      .def("pin_device_tensor", &TensorIo::pin_device, "tensor"_a, Unlocked(), "Registers a tensor with cuFile.")
      .def("unpin_device_tensor", &TensorIo::unpin_device, "tensor"_a, Unlocked());

  const auto once = [pool, files](bool reads) {
    return [pool, files, reads](const at::Tensor& buffer, const py::object& filename, size_t block_size,
                                int queue_depth, bool single_submit, bool overlap_events, bool validate) {
      const auto options = options_of(block_size, queue_depth, single_submit, overlap_events);
      const auto handle = freed_without_lock(new TensorIo(files, pool, options, 1));
      return reads ? read(*handle, buffer, filename, validate, How::kAlone, 0)
                   : write(*handle, buffer, filename, validate, How::kAlone, 0);
    };
  };
  const auto validate = "validate"_a = false;
  aio.def("aio_read", once(true), "buffer"_a, "filename"_a, block_size, queue_depth, single_submit, overlap_events,
          validate);
  aio.def("aio_write", once(false), "buffer"_a, "filename"_a, block_size, queue_depth, single_submit, overlap_events,
          validate);
  aio.def(
      "deepspeed_memcpy",
      [](const at::Tensor& dest, const at::Tensor& src, int threads) {
        storage::copy_bytes(dest, src, threads);
        return 0;
      },
      "dest"_a, "src"_a, "threads"_a = 4, Unlocked());

  py::class_<BufferedWriter, std::shared_ptr<BufferedWriter>>(aio, "BufferedWriter")
      .def(py::init([](const HandlePtr& handle, const py::object& path, const at::Tensor& memory, bool two_halves,
                       int writers, int rank) {
             storage::WriterShare share;
             share.two_halves = two_halves;
             share.writers = writers;
             share.rank = rank;
             const std::string name = path_of(path);
             py::gil_scoped_release released;
             return freed_without_lock(new BufferedWriter(handle, name, memory, share));
           }),
           "handle"_a, "path"_a, "memory"_a, "two_halves"_a, "writers"_a, "rank"_a)
      .def("write",
           [](BufferedWriter& self, const py::buffer& data) {
             const py::buffer_info info = data.request();
             if (!PyBuffer_IsContiguous(info.view(), 'C'))
               throw py::value_error("the memory to write must be contiguous");
             const auto bytes =
                 static_cast<size_t>(sizes::product<int64_t>("bytes of a buffer", info.size, info.itemsize));
             py::gil_scoped_release released;
             self.write(info.ptr, bytes);
             return bytes;
           })
      .def("write_tensor",
           [](BufferedWriter& self, const at::Tensor& tensor) {
             py::gil_scoped_release released;
             const at::Tensor host = tensor.detach().cpu().contiguous();
             if (host.numel() > 0) self.write(host.data_ptr(), host.nbytes());
             return host.nbytes();
           })
      .def("flush", &BufferedWriter::flush, Unlocked())
      .def("fileno", &BufferedWriter::descriptor, Unlocked())
      .def("close", &BufferedWriter::close, Unlocked())
      .def_property_readonly("closed", &BufferedWriter::closed)
      .def_property_readonly("position", &BufferedWriter::position)
      .def_property_readonly("written", &BufferedWriter::written)
      .def_property_readonly("seconds_waited", &BufferedWriter::seconds_waited);
}

}  // namespace ds::bindings
