// Blocks of a plane that have a file each, under names that others know: what is in them are the elements and nothing
// else. Files are opened for each transfer: there may be more of them than a process may have open.
#pragma once
#include <memory>
#include <mutex>

#include "base/process.h"
#include "io/async/transfer_queue.h"
#include "storage/tier.h"

namespace ds::storage {

// The files of one part.
class FileList {
 public:
  FileList(std::string folder, const std::vector<std::string>& names, std::shared_ptr<io::RunFolder> owned);
  ~FileList() { remove_files(); }

  // Returns the path of a block's file. Makes the file where it is missing, under another name where another plane has
  // it.
  std::string made(size_t block);
  std::string path(size_t block) const;  // "": nobody has written it
  void discard(size_t block) noexcept;
  void remove() noexcept;  // the process ends: all files go, and the folder where nobody else has something in it

 private:
  void remove_files() noexcept;

  const std::string folder_;
  const std::vector<std::string> names_;
  const std::shared_ptr<io::RunFolder> owned_;
  const OwningProcess owner_;
  mutable std::mutex lock_;
  std::vector<std::string> paths_;
};

class BlockFiles : public Part {
 public:
  // `queue`: whose threads share a transfer.
  BlockFiles(const FileAccess& access, std::shared_ptr<io::TransferQueue> queue, const PartSpec& spec);

  const std::shared_ptr<FileList>& list() const { return files_; }

  bool any_address() const override { return true; }
  void read(size_t block, char* data) override;
  void write(size_t block, char* data) override { transfer(files_->made(block), block, data, /*reads=*/false); }
  bool reaches_device() const override { return access_.cufile != nullptr; }
  void read_device(size_t block, const at::Tensor& memory, int64_t offset) override;
  void write_device(size_t block, const at::Tensor& memory, int64_t offset) override;
  void discard(size_t block) override { files_->discard(block); }

 private:
  void transfer(const std::string& path, size_t block, char* data, bool reads);

  const FileAccess access_;
  const std::shared_ptr<io::TransferQueue> queue_;
  const std::vector<int64_t> bytes_;
  const std::shared_ptr<FileList> files_;
};

}  // namespace ds::storage
