// A partition on its way from where states rest into a checkpoint: the elements come from all ranks in no order, wait
// in a file without a name, and are read when the checkpoint is written. What is in memory for it does not grow with
// the model.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "io/byte_source.h"
#include "io/descriptor.h"
#include "io/files.h"

namespace ds::zero {

class SpooledPartition : public io::ByteSource {
 public:
  // `numel` elements, zero where nobody puts any. The file is in `folder`; nothing of it is left there, however this
  // process ends. `files`: null, or whose faults count. Throws FileError, of a full disk too.
  SpooledPartition(const std::string& folder, int64_t numel, at::ScalarType type, std::shared_ptr<io::Files> files);

  // Elements from `at` on; those behind the end are dropped. Not while somebody reads.
  void put(int64_t at, const at::Tensor& values);

  uint64_t bytes() const override { return static_cast<uint64_t>(numel_) * c10::elementSize(type_); }
  bool in_place() const override { return false; }
  void each(io::Staging& staging, const io::TakePiece& take) const override;
  void copy_range(char* to, uint64_t begin, uint64_t end) const override;

 private:
  const int64_t numel_;
  const at::ScalarType type_;
  const std::shared_ptr<io::Files> files_;
  std::string path_;
  io::Descriptor file_;
};

}  // namespace ds::zero
