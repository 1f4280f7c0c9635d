// Reads and writes of the file tier.
#pragma once
#include <memory>
#include <utility>

#include "io/async/cufile.h"
#include "io/files.h"
#include "io/async/transfer.h"

namespace ds::storage {

struct FileAccess {
  FileAccess() = default;
  FileAccess(std::shared_ptr<io::Files> with) : files(std::move(with)) {}

  std::shared_ptr<io::Files> files;  // null: one of its own
  // Transfers of blocks that have a file each.
  io::TransferOptions transfers{};
  int threads = 1;                       // that share the transfer of one block
  std::shared_ptr<io::CuFile> cufile{};  // moves such blocks to and from a device by itself; null: the host does
};

}  // namespace ds::storage
