// Tensors in files: the bytes of a tensor, in row-major order, at an offset of a file.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <set>
#include <string>
#include <utility>

#include "io/async/cufile.h"
#include "io/files.h"
#include "io/memory/locked_pool.h"
#include "io/async/transfer_queue.h"

namespace ds::storage {

// Reads and writes tensors. Tensors of a device pass through host memory, block by block, unless cuFile copies
// them. Thread-safe; the interpreter's lock is not needed.
class TensorIo {
 public:
  // A file by name, or one that the caller has open and keeps open until the operation has ended.
  struct FileOffset {
    std::string path;
    int number = -1;
    uint64_t offset = 0;
  };
  enum class How {
    kAlone,
    kWait,
    kBackground
  };  // by the calling thread; by all threads; by all threads, without waiting

  // `cufile`: copies tensors of a device without the host; may be null.
  TensorIo(std::shared_ptr<io::Files> files, std::shared_ptr<io::LockedPool> pool, const io::TransferOptions& options,
           int threads, std::shared_ptr<io::CuFile> cufile = nullptr);
  ~TensorIo();

  const io::TransferOptions& options() const { return options_; }
  int threads() const { return queue_.threads(); }
  // Offsets, sizes and addresses that are multiples of it need neither the page cache nor another copy.
  static size_t alignment();

  // Fills the tensor, or writes it. `validate`: reads the file again and compares. kBackground: `tensor` must not be
  // used until wait(). Throws FileError and ErrorKind::kRuntime; with kBackground wait() throws errors of the transfer.
  void read(const at::Tensor& tensor, const FileOffset& file, How how, bool validate);
  void write(const at::Tensor& tensor, const FileOffset& file, How how, bool validate);

  // Waits for all background operations. Returns how many have ended since the last call; throws the first error.
  int64_t wait() { return queue_.wait(); }
  int64_t pending() const { return queue_.pending(); }

  // Starts to write host memory, which the caller keeps until the ticket's wait(); wait() above ignores it.
  io::TransferQueue::Ticket write_memory(std::shared_ptr<io::BlockFile> file, char* memory, uint64_t bytes,
                                         uint64_t offset);
  io::Files& files() const { return *files_; }

  // ---- memory ------------------------------------------------------------------------------------------------------
  at::Tensor new_locked(int64_t numel, const at::Tensor& example);
  bool free_locked(const at::Tensor& tensor);  // false: it is not from the pool
  bool is_pinned(const at::Tensor& tensor) const;

  // Memory of a device, registered with cuFile.
  at::Tensor new_device(int64_t numel, const at::Tensor& example);
  bool pin_device(const at::Tensor& tensor);
  bool unpin_device(const at::Tensor& tensor);

 private:
  void move(const at::Tensor& tensor, const FileOffset& file, How how, bool validate, bool reads);
  bool by_cufile(const at::Tensor& tensor) const;
  io::CuFile& cufile(const char* what) const;

  const std::shared_ptr<io::Files> files_;
  const std::shared_ptr<io::LockedPool> pool_;
  const io::TransferOptions options_;
  const std::shared_ptr<io::CuFile> cufile_;
  mutable std::mutex lock_;
  std::set<std::pair<const char*, size_t>> registered_;  // with cuFile
  io::TransferQueue queue_;                              // last: its threads use all of the above
};

// A tensor of the pool; its memory returns when the last view of it is gone.
at::Tensor locked_tensor(const std::shared_ptr<io::LockedPool>& pool, int64_t numel, at::ScalarType type);

// Copies `from` into `to`, both contiguous, of the host and of as many bytes, on `threads` threads.
void copy_bytes(const at::Tensor& to, const at::Tensor& from, int threads);

}  // namespace ds::storage
