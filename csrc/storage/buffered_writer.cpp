#include "storage/buffered_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>

#include "base/clock.h"
#include "base/error.h"
#include "io/memory/aligned_pool.h"
#include "io/file_error.h"
#include "storage/flat_view.h"

namespace ds::storage {

BufferedWriter::BufferedWriter(std::shared_ptr<TensorIo> io, const std::string& path, const at::Tensor& memory,
                               const WriterShare& share)
    : io_(std::move(io)), path_(path), memory_(memory), share_(share) {
  if (!memory_.is_cpu() || !memory_.is_contiguous()) {
    fail(ErrorKind::kValue, "pinned_tensor of a file writer is a contiguous tensor of the host, got one on ",
         memory_.device());
  }
  if (share_.writers < 1 || share_.rank < 0 || share_.rank >= share_.writers) {
    fail(ErrorKind::kValue, "writer_rank is from 0 to num_parallel_writers - 1, got ", share_.rank, " of ",
         share_.writers);
  }
  const auto first = reinterpret_cast<uintptr_t>(memory_.data_ptr());
  const uintptr_t begin = io::round_up(first, io::kBlockBytes);
  const auto bytes = static_cast<uintptr_t>(bytes_of(memory_));
  // Several writers cut the file at the same offsets, so the capacity must not depend on where the memory of one
  // begins.
  const uintptr_t skipped = share_.writers > 1 ? io::kBlockBytes - 1 : begin - first;
  const uintptr_t usable = bytes > skipped ? bytes - skipped : 0;
  const uint64_t halves = share_.two_halves ? 2 : 1;
  capacity_ = usable / halves / io::kBlockBytes * io::kBlockBytes;
  if (capacity_ == 0) {
    fail(ErrorKind::kValue, "pinned_tensor of a file writer has at least ", (halves + 1) * io::kBlockBytes, " bytes (",
         halves * io::kBlockBytes, " where one writer has memory that begins at a page), got ", bytes);
  }
  for (uint64_t i = 0; i < halves; ++i) halves_[i].memory = reinterpret_cast<char*>(begin + i * capacity_);  // NOLINT
  if (share_.writers == 1) {
    bool direct = true;
    bool resizable = true;
    io_->files().create(path_, &direct, &resizable);
  }
  file_ = std::make_shared<io::BlockFile>(io_->files(), path_, io::BlockFile::Mode::kWrite);
}

BufferedWriter::~BufferedWriter() {
  for (Half& half : halves_) {
    try {
      await(half);
    } catch (const std::exception&) {  // the caller has gone
    }
  }
}

void BufferedWriter::await(Half& half) {
  if (!half.ticket) return;
  const io::TransferQueue::Ticket ticket = *half.ticket;
  half.ticket.reset();
  const auto start = Clock::now();
  ticket.wait();
  waited_ += seconds_since(start);
}

void BufferedWriter::adopt_position() {
  if (!is_lent_) return;
  is_lent_ = false;
  const off_t now = ::lseek(lent_.get(), 0, SEEK_CUR);
  if (now < 0) io::fail_file(errno, "seek", path_);
  position_ = from_ = static_cast<uint64_t>(now);
}

void BufferedWriter::write(const void* data, size_t bytes) {
  if (closed()) fail(ErrorKind::kValue, path_, " is closed already: nothing can be written to it");
  if (from_ == position_) adopt_position();
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const uint64_t window = position_ / capacity_;
    const uint64_t filled = position_ % capacity_;
    const auto now = static_cast<size_t>(std::min<uint64_t>(bytes, capacity_ - filled));
    if (mine(window)) {
      Half& half = halves_[share_.two_halves ? window / static_cast<uint64_t>(share_.writers) % 2 : 0];
      if (from_ == position_) await(half);
      memcpy(half.memory + filled, at, now);
    }
    position_ += now;
    at += now;
    bytes -= now;
    if (filled + now == capacity_) send();
  }
}

// The bytes of the current half that are not written yet: from_ to position_.
void BufferedWriter::send() {
  if (from_ == position_) return;
  const uint64_t window = from_ / capacity_;
  if (mine(window)) {
    Half& half = halves_[share_.two_halves ? window / static_cast<uint64_t>(share_.writers) % 2 : 0];
    half.ticket = io_->write_memory(file_, half.memory + from_ % capacity_, position_ - from_, from_);
    written_ += position_ - from_;
  }
  from_ = position_;
}

void BufferedWriter::flush() {
  if (closed()) return;
  send();
  for (Half& half : halves_) await(half);
}

int BufferedWriter::descriptor() {
  if (closed()) fail(ErrorKind::kValue, path_, " is closed already: it has no descriptor");
  if (share_.writers > 1) {
    fail(ErrorKind::kValue, path_, " is written by ", share_.writers, " writers: none of them has it for itself");
  }
  if (from_ == position_) adopt_position();
  flush();
  if (!lent_.is_open()) {
    bool direct = false;
    lent_ = io_->files().open_part(path_, &direct, /*read=*/true);
  }
  if (::lseek(lent_.get(), static_cast<off_t>(position_), SEEK_SET) < 0) io::fail_file(errno, "seek", path_);
  is_lent_ = true;
  return lent_.get();
}

uint64_t BufferedWriter::close() {
  if (closed()) return position_;
  if (from_ == position_) adopt_position();
  flush();
  io_->files().truncate(file_->direct(), path_, position_);
  io_->files().sync(file_->direct(), path_);
  file_.reset();
  lent_.reset();
  return position_;
}

}  // namespace ds::storage
