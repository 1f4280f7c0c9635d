#include "storage/tensor_io.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>

#include "base/error.h"
#include "base/sizes.h"
#include "io/memory/aligned_pool.h"
#include "io/memory/host_memory.h"
#include "storage/fence.h"
#include "storage/flat_view.h"

namespace ds::storage {
namespace {

constexpr size_t kLargestHostBlock = 64 << 20;

at::Tensor flat_bytes(const at::Tensor& tensor) {
  return flat_view(tensor, tensor.storage_offset() * static_cast<int64_t>(tensor.element_size()), at::kByte,
                   bytes_of(tensor));
}

at::Tensor host_view(char* host, size_t bytes) {
  return at::from_blob(host, {static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte));
}

// Memory of a device, copied by torch behind what the caller has launched.
class DeviceBytes : public io::RemoteMemory {
 public:
  explicit DeviceBytes(const at::Tensor& contiguous)
      : bytes_(flat_bytes(contiguous)), before_(Fence::after(contiguous)) {}

  void load(char* host, uint64_t at, size_t bytes) override { copy(host_view(host, bytes), part(at, bytes)); }
  void store(const char* host, uint64_t at, size_t bytes) override {
    copy(part(at, bytes), host_view(const_cast<char*>(host), bytes));  // NOLINT: read only
  }

 private:
  at::Tensor part(uint64_t at, size_t bytes) const {
    return flat_view(bytes_, static_cast<int64_t>(at) + bytes_.storage_offset(), at::kByte,
                     static_cast<int64_t>(bytes));
  }
  // Done when it returns: the host's memory is of no stream.
  void copy(const at::Tensor& to, const at::Tensor& from) const {
    const c10::InferenceMode without_autograd;
    if (before_) before_->wait(bytes_);
    to.copy_(from);
  }

  const at::Tensor bytes_;
  const FencePtr before_;
};

std::unique_ptr<io::BlockFile> open_file(io::Files& files, const TensorIo::FileOffset& file, bool reads) {
  const auto mode = reads ? io::BlockFile::Mode::kRead : io::BlockFile::Mode::kWrite;
  if (file.number >= 0) return std::make_unique<io::BlockFile>(files, file.number, mode);
  return std::make_unique<io::BlockFile>(files, file.path, mode);
}

// One operation: what its parts share.
struct Operation {
  at::Tensor tensor;      // the caller's
  at::Tensor contiguous;  // the same, or a copy in row-major order
  std::unique_ptr<io::RemoteMemory> remote;
  std::unique_ptr<io::BlockFile> file;
  std::unique_ptr<io::CuFile::File> device_file;

  io::Span span() const {
    const auto bytes = static_cast<uint64_t>(bytes_of(contiguous));
    if (remote) return {nullptr, remote.get(), 0, bytes};
    return {bytes == 0 ? nullptr : static_cast<char*>(contiguous.data_ptr()), nullptr, 0, bytes};
  }
};

io::Span part_of(const io::Span& span, uint64_t begin, uint64_t bytes) {
  return {span.host == nullptr ? nullptr : span.host + begin, span.remote, span.begin + begin, bytes};
}

void check(const at::Tensor& tensor) {
  if (!tensor.defined()) fail(ErrorKind::kValue, "the buffer is not a tensor");
  if (tensor.layout() != at::kStrided || tensor.is_meta()) {
    fail(ErrorKind::kValue, "a buffer of files is a dense tensor with elements, got one that is ", tensor.layout(),
         " on ", tensor.device(), ": make it dense (to_dense()) or give it memory");
  }
}

}  // namespace

TensorIo::TensorIo(std::shared_ptr<io::Files> files, std::shared_ptr<io::LockedPool> pool,
                   const io::TransferOptions& options, int threads, std::shared_ptr<io::CuFile> cufile)
    : files_(std::move(files)), pool_(std::move(pool)), options_(options), cufile_(std::move(cufile)), queue_(threads) {
  io::check(options_);
}

TensorIo::~TensorIo() {
  try {
    queue_.wait();
  } catch (const std::exception&) {  // the caller has gone
  }
  for (const auto& [memory, bytes] : registered_) cufile_->remove(memory);
}

size_t TensorIo::alignment() { return io::kBlockBytes; }

void TensorIo::read(const at::Tensor& tensor, const FileOffset& file, How how, bool validate) {
  move(tensor, file, how, validate, true);
}

void TensorIo::write(const at::Tensor& tensor, const FileOffset& file, How how, bool validate) {
  move(tensor, file, how, validate, false);
}

bool TensorIo::by_cufile(const at::Tensor& tensor) const {
  if (!cufile_) return false;
  if (!tensor.is_cpu()) return true;
  const auto* first = static_cast<const char*>(tensor.data_ptr());
  const std::lock_guard guard(lock_);
  for (const auto& [memory, bytes] : registered_) {
    if (first >= memory && first + bytes_of(tensor) <= memory + bytes) return true;
  }
  return false;
}

void TensorIo::move(const at::Tensor& tensor, const FileOffset& file, How how, bool validate, bool reads) {
  storage::check(tensor);
  auto now = std::make_shared<Operation>();
  now->tensor = tensor;
  {
    const c10::InferenceMode without_autograd;
    now->contiguous = tensor.is_contiguous() ? tensor
                      : reads                ? at::empty_like(tensor, at::MemoryFormat::Contiguous)
                                             : tensor.contiguous();
  }
  const bool device = by_cufile(now->contiguous);
  if (!tensor.is_cpu()) now->remote = std::make_unique<DeviceBytes>(now->contiguous);
  now->file = open_file(*files_, file, reads);
  const io::Span span = now->span();
  sizes::sum("file_offset + bytes", static_cast<int64_t>(file.offset), static_cast<int64_t>(span.bytes));
  if (!reads) now->file->reserve(file.offset + span.bytes, file.offset, span.bytes);
  if (device) {
    if (file.number >= 0) fail(ErrorKind::kValue, "gds_handle opens files by name, got file descriptor ", file.number);
    now->device_file = std::make_unique<io::CuFile::File>(*cufile_, file.path, !reads);
  }

  io::TransferQueue::Request request;
  request.offset = file.offset;
  request.bytes = span.bytes;
  request.keep = now;
  // torch decides which streams of copies wait for the caller's kernels: `remote` orders each copy.
  request.move = [this, file, span, device, reads, operation = now.get()](uint64_t begin, uint64_t bytes) {
    if (device) {
      void* base = operation->contiguous.data_ptr();
      if (reads) return operation->device_file->read(base, begin, bytes, file.offset + begin);
      return operation->device_file->write(base, begin, bytes, file.offset + begin);
    }
    const io::Span part = part_of(span, begin, bytes);
    if (reads) return io::read_span(*operation->file, part, file.offset + begin, options_);
    io::write_span(*operation->file, part, file.offset + begin, options_);
  };
  const bool copy_back = reads && !tensor.is_contiguous();
  if (validate || copy_back) {
    request.after = [file, span, validate, copy_back, operation = now.get()] {
      if (validate) io::compare_span(*operation->file, span, file.offset);
      const c10::InferenceMode without_autograd;
      if (copy_back) operation->tensor.copy_(operation->contiguous);
    };
  }
  if (how == How::kBackground) {
    queue_.start(std::move(request));
  } else {
    queue_.run(std::move(request), how == How::kAlone);
  }
}

io::TransferQueue::Ticket TensorIo::write_memory(std::shared_ptr<io::BlockFile> file, char* memory, uint64_t bytes,
                                                 uint64_t offset) {
  file->reserve(offset + bytes, offset, bytes);
  io::TransferQueue::Request request;
  request.offset = offset;
  request.bytes = bytes;
  request.keep = file;
  request.move = [this, memory, offset, file = file.get()](uint64_t begin, uint64_t part) {
    io::write_span(*file, {memory + begin, nullptr, 0, part}, offset + begin, options_);
  };
  return queue_.start(std::move(request), /*counted=*/false);
}

// ---- memory --------------------------------------------------------------------------------------------------------

at::Tensor locked_tensor(const std::shared_ptr<io::LockedPool>& pool, int64_t numel, at::ScalarType type) {
  if (numel < 0) fail(ErrorKind::kValue, "a page-locked tensor has 0 elements or more, got ", numel);
  const auto block = pool->allocate(
      sizes::product("bytes of a page-locked tensor", static_cast<size_t>(numel), c10::elementSize(type)));
  return at::from_blob(
      block->data(), {numel}, [block](void*) {}, at::TensorOptions().dtype(type));
}

at::Tensor TensorIo::new_locked(int64_t numel, const at::Tensor& example) {
  return locked_tensor(pool_, numel, example.scalar_type());
}

bool TensorIo::free_locked(const at::Tensor& tensor) { return tensor.is_cpu() && pool_->release(tensor.data_ptr()); }

bool TensorIo::is_pinned(const at::Tensor& tensor) const {
  if (!tensor.is_cpu()) {
    const auto* first = static_cast<const char*>(tensor.data_ptr());
    const std::lock_guard guard(lock_);
    for (const auto& [memory, bytes] : registered_) {
      if (first >= memory && first + bytes_of(tensor) <= memory + bytes) return true;
    }
    return false;
  }
  return pool_->holds(tensor.data_ptr(), static_cast<size_t>(bytes_of(tensor))) || tensor.is_pinned();
}

io::CuFile& TensorIo::cufile(const char* what) const {
  if (!cufile_) fail(ErrorKind::kRuntime, what, " is for gds_handle: this handle moves bytes through the host");
  return *cufile_;
}

at::Tensor TensorIo::new_device(int64_t numel, const at::Tensor& example) {
  cufile("new_pinned_device_tensor");
  at::Tensor made = at::empty({numel}, example.options());
  pin_device(made);
  return made;
}

bool TensorIo::pin_device(const at::Tensor& tensor) {
  io::CuFile& library = cufile("pin_device_tensor");
  if (!tensor.is_contiguous()) fail(ErrorKind::kValue, "pin_device_tensor needs a contiguous tensor");
  const auto* memory = static_cast<const char*>(tensor.data_ptr());
  const auto bytes = static_cast<size_t>(bytes_of(tensor));
  {
    const std::lock_guard guard(lock_);
    if (!registered_.emplace(memory, bytes).second) return false;
  }
  try {
    library.add(memory, bytes);
  } catch (...) {
    const std::lock_guard guard(lock_);
    registered_.erase({memory, bytes});
    throw;
  }
  return true;
}

bool TensorIo::unpin_device(const at::Tensor& tensor) {
  io::CuFile& library = cufile("unpin_device_tensor");
  const auto* memory = static_cast<const char*>(tensor.data_ptr());
  {
    const std::lock_guard guard(lock_);
    if (registered_.erase({memory, static_cast<size_t>(bytes_of(tensor))}) == 0) return false;
  }
  library.remove(memory);
  return true;
}

void copy_bytes(const at::Tensor& to, const at::Tensor& from, int threads) {
  if (!to.is_cpu() || !from.is_cpu() || !to.is_contiguous() || !from.is_contiguous() ||
      bytes_of(to) != bytes_of(from)) {
    fail(ErrorKind::kValue, "deepspeed_memcpy copies between contiguous tensors of the host with as many bytes, got ",
         bytes_of(from), " bytes on ", from.device(), " for ", bytes_of(to), " on ", to.device());
  }
  if (bytes_of(to) == 0) return;
  io::copy_all({{from.data_ptr(), to.data_ptr(), static_cast<size_t>(bytes_of(to))}}, threads);
}

}  // namespace ds::storage
