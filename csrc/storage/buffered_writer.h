// A file written from its start through the memory of a tensor: one half is filled while the other is on its way.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>

#include "storage/tensor_io.h"

namespace ds::storage {

struct WriterShare {
  bool two_halves = true;
  // Several writers are given the same bytes, and each writes every `writers`-th half of the memory to the same file.
  // The memory of all is of one size.
  int writers = 1;
  int rank = 0;
};

// One thread at a time.
class BufferedWriter {
 public:
  // Makes or empties `path`; with several writers it is made, and cut to its size by close(). `memory`: of the host,
  // contiguous, left alone by everybody else. Throws ErrorKind::kValue, FileError.
  BufferedWriter(std::shared_ptr<TensorIo> io, const std::string& path, const at::Tensor& memory,
                 const WriterShare& share);
  ~BufferedWriter();  // waits for what is on its way; a file that was not closed stays as it is
  BufferedWriter(const BufferedWriter&) = delete;
  BufferedWriter& operator=(const BufferedWriter&) = delete;

  // Appends; the memory is the caller's again on return. Throws FileError, also for an earlier write.
  void write(const void* data, size_t bytes);

  // All that was written is in the file.
  void flush();

  // Flushes and gives a descriptor at the end of what was written; who writes through it goes on from there, and so
  // does the next write(). Throws ErrorKind::kValue where several writers share the file.
  int descriptor();

  // Flushes, sets the size, fsync. Returns the bytes of the file. Once.
  uint64_t close();
  bool closed() const { return file_ == nullptr; }

  uint64_t position() const { return position_; }
  uint64_t written() const { return written_; }      // by this writer
  double seconds_waited() const { return waited_; }  // for the disk

 private:
  struct Half {
    char* memory = nullptr;
    std::optional<io::TransferQueue::Ticket> ticket;
  };
  void adopt_position();
  void send();
  void await(Half& half);
  bool mine(uint64_t window) const {
    return static_cast<int>(window % static_cast<uint64_t>(share_.writers)) == share_.rank;
  }

  const std::shared_ptr<TensorIo> io_;
  const std::string path_;
  const at::Tensor memory_;
  const WriterShare share_;
  std::shared_ptr<io::BlockFile> file_;
  io::Descriptor lent_;   // the result of descriptor()
  bool is_lent_ = false;  // and nothing was written here since
  Half halves_[2];
  uint64_t capacity_ = 0;  // of a half
  uint64_t position_ = 0;  // in the file, of the next byte
  uint64_t from_ = 0;      // in the file, of the first byte that waits in the current half
  uint64_t written_ = 0;
  double waited_ = 0;
};

}  // namespace ds::storage
