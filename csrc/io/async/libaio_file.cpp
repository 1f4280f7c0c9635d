// Transfers by libaio.
#include <errno.h>
#include <libaio.h>

#include <vector>

#include "io/async/aio_contexts.h"
#include "io/file_error.h"
#include "io/async/queued_file.h"

namespace ds::io {
namespace {

class LibaioFile : public QueuedFile {
 public:
  LibaioFile(Files& files, const Descriptor& file, const std::string& path, io_context_t context, int depth,
             bool batched)
      : QueuedFile(files, file, path, depth, batched),
        context_(context),
        depth_(depth),
        blocks_(static_cast<size_t>(depth)),
        events_(static_cast<size_t>(depth)) {}

  ~LibaioFile() override {
    drain();
    if (busy() == 0) {
      files_.aio_contexts().give_back(context_, depth_);
    } else {
      io_destroy(context_);  // waits as well
    }
  }

  const char* name() const override { return "libaio"; }

 private:
  void prepare(size_t number, size_t bytes) override {
    const Slot& request = slot(number);
    iocb& block = blocks_[number];
    if (request.reads) {
      io_prep_pread(&block, file_.get(), request.buffer, bytes, static_cast<long long>(request.offset));
    } else {
      io_prep_pwrite(&block, file_.get(), request.buffer, bytes, static_cast<long long>(request.offset));
    }
    block.data = &block;
  }

  void tell() override {
    waiting_.clear();
    for (const size_t number : prepared()) waiting_.push_back(&blocks_[number]);
    for (size_t at = 0; at < waiting_.size();) {
      const int taken = io_submit(context_, static_cast<long>(waiting_.size() - at), waiting_.data() + at);
      if (taken == -EINTR) continue;
      if (taken > 0) {
        begun(static_cast<size_t>(taken));
        at += static_cast<size_t>(taken);
        continue;
      }
      // EAGAIN: the kernel's queue is full for now; EINVAL: this file has no O_DIRECT after all.
      finish_here(prepared()[at++]);
    }
  }

  void collect(std::vector<Completion>& into, bool block) override {
    int got;
    do {
      timespec now = {0, 0};
      got = io_getevents(context_, block ? 1 : 0, static_cast<long>(events_.size()), events_.data(),
                         block ? nullptr : &now);
    } while (got == -EINTR || (got == 0 && block));
    if (got < 0) fail_file(-got, "waiting for transfers", path_);
    for (int i = 0; i < got; ++i) {
      const auto number = static_cast<size_t>(static_cast<iocb*>(events_[i].data) - blocks_.data());
      // The kernel's answer, a negative errno in an unsigned type.
      into.push_back({number, static_cast<long long>(static_cast<long>(events_[i].res))});
    }
  }

  io_context_t context_;
  const int depth_;
  std::vector<iocb> blocks_;  // never resized: the kernel holds addresses
  std::vector<io_event> events_;
  std::vector<iocb*> waiting_;
};

}  // namespace

std::unique_ptr<AsyncFile> open_libaio(Files& files, const Descriptor& file, const std::string& path, int depth,
                                       bool batched) {
  io_context* context = files.aio_contexts().take(depth);
  if (context == nullptr) return nullptr;
  return std::make_unique<LibaioFile>(files, file, path, context, depth, batched);
}

}  // namespace ds::io
