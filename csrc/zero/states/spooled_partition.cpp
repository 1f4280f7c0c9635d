#include "zero/states/spooled_partition.h"

#include <errno.h>
#include <fcntl.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "io/file_error.h"
#include "io/folders/swap_files.h"

namespace ds::zero {

SpooledPartition::SpooledPartition(const std::string& folder, int64_t numel, at::ScalarType type,
                                   std::shared_ptr<io::Files> files)
    : numel_(numel), type_(type), files_(files ? std::move(files) : std::make_shared<io::Files>()) {
  if (numel == 0) return;
  io::SwapFile made(folder, "checkpoint");
  path_ = made.path();
  file_ = io::Descriptor(::open(path_.c_str(), O_RDWR | O_CLOEXEC));
  if (!file_.is_open()) io::fail_file(errno, "opening", path_);
  files_->truncate(file_, path_, bytes());
  files_->reserve(file_, path_, bytes());
}

void SpooledPartition::put(int64_t at, const at::Tensor& values) {
  const int64_t numel = std::min(values.numel(), numel_ - at);
  if (numel <= 0) return;
  const at::Tensor flat = values.to(at::kCPU, type_).contiguous();
  const uint64_t width = c10::elementSize(type_);
  files_->write_all(file_, path_, flat.data_ptr(), static_cast<size_t>(numel) * width,
                    static_cast<uint64_t>(at) * width);
}

void SpooledPartition::each(io::Staging&, const io::TakePiece& take) const {
  constexpr uint64_t kPiece = 1 << 20;
  std::vector<char> piece(static_cast<size_t>(std::min(kPiece, bytes())));
  for (uint64_t at = 0; at < bytes(); at += kPiece) {
    const uint64_t now = std::min(kPiece, bytes() - at);
    copy_range(piece.data(), at, at + now);
    take(piece.data(), now);
  }
}

void SpooledPartition::copy_range(char* to, uint64_t begin, uint64_t end) const {
  if (begin < end) files_->read_all(file_, path_, to, end - begin, begin, end - begin);
}

}  // namespace ds::zero
