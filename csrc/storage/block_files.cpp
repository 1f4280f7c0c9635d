#include "storage/block_files.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include <utility>

#include "io/file_error.h"
#include "io/folders/own_folder.h"

namespace ds::storage {
namespace {

// Makes the file, under this name or with a number behind it where somebody has that; only this user can read it.
std::string make_file(const std::string& folder, const std::string& name) {
  const size_t slash = name.rfind('/');
  const std::string below = slash == std::string::npos ? "" : name.substr(0, slash);
  const std::string file = slash == std::string::npos ? name : name.substr(slash + 1);
  std::string path;
  io::despite_removal([&] {
    const io::Descriptor there = io::own_folder(folder, below, /*make=*/true);
    for (int number = 0;; ++number) {
      const std::string more = number == 0 ? "" : "." + std::to_string(number);
      path = folder + "/" + name + more;
      io::Descriptor made(::openat(there.get(), (file + more).c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600));
      if (made.is_open()) return made;
      if (errno != EEXIST) io::fail_file(errno, "creating a file", path);
    }
  });
  return path;
}

}  // namespace

FileList::FileList(std::string folder, const std::vector<std::string>& names, std::shared_ptr<io::RunFolder> owned)
    : folder_(std::move(folder)), names_(names), owned_(std::move(owned)), paths_(names.size()) {}

std::string FileList::made(size_t block) {
  const std::lock_guard guard(lock_);
  if (paths_[block].empty()) paths_[block] = make_file(folder_, names_[block]);
  return paths_[block];
}

std::string FileList::path(size_t block) const {
  const std::lock_guard guard(lock_);
  return paths_[block];
}

void FileList::discard(size_t block) noexcept {
  const std::lock_guard guard(lock_);
  if (owner_.here() && !paths_[block].empty()) ::unlink(paths_[block].c_str());
  paths_[block].clear();
}

void FileList::remove_files() noexcept {
  for (size_t block = 0; block < paths_.size(); ++block) discard(block);
}

void FileList::remove() noexcept {
  remove_files();
  if (owned_) owned_->close();
}

BlockFiles::BlockFiles(const FileAccess& access, std::shared_ptr<io::TransferQueue> queue, const PartSpec& spec)
    : access_(access),
      queue_(std::move(queue)),
      bytes_(spec.block_bytes),
      files_(std::make_shared<FileList>(spec.placement.folder, spec.block_files, spec.folder)) {}

void BlockFiles::read(size_t block, char* data) {
  const std::string path = files_->path(block);
  if (path.empty()) {
    memset(data, 0, static_cast<size_t>(bytes_[block]));
  } else {
    transfer(path, block, data, /*reads=*/true);
  }
}

void BlockFiles::read_device(size_t block, const at::Tensor& memory, int64_t offset) {
  io::CuFile::File(*access_.cufile, files_->made(block), /*write=*/false)
      .read(memory.data_ptr(), static_cast<uint64_t>(offset), static_cast<uint64_t>(bytes_[block]), 0);
}

void BlockFiles::write_device(size_t block, const at::Tensor& memory, int64_t offset) {
  io::CuFile::File(*access_.cufile, files_->made(block), /*write=*/true)
      .write(memory.data_ptr(), static_cast<uint64_t>(offset), static_cast<uint64_t>(bytes_[block]), 0);
}

void BlockFiles::transfer(const std::string& path, size_t block, char* data, bool reads) {
  const auto whole = static_cast<uint64_t>(bytes_[block]);
  const auto opened = std::make_shared<io::BlockFile>(*access_.files, path,
                                                      reads ? io::BlockFile::Mode::kRead : io::BlockFile::Mode::kWrite);
  if (!reads) opened->reserve(whole, 0, whole);
  io::TransferQueue::Request request;
  request.bytes = whole;
  request.move = [&](uint64_t begin, uint64_t bytes) {
    const io::Span span{data + begin, nullptr, 0, bytes};
    if (reads) {
      io::read_span(*opened, span, begin, access_.transfers);
    } else {
      io::write_span(*opened, span, begin, access_.transfers);
    }
  };
  queue_->run(std::move(request));
}

}  // namespace ds::storage
