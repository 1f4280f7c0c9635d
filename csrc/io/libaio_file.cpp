#include <errno.h>
#include <libaio.h>
#include <string.h>

#include <vector>

#include "io/aligned_pool.h"
#include "io/async_file.h"
#include "io/file_error.h"

namespace ds::io {
namespace {

class LibaioFile : public AsyncFile {
 public:
  LibaioFile(Files& files, const Descriptor& file, const std::string& path, io_context_t context, int depth)
      : files_(files), file_(file), path_(path), context_(context), slots_(static_cast<size_t>(depth)) {}

  ~LibaioFile() override {
    while (busy_ > 0) {
      io_event event;
      const int got = io_getevents(context_, 1, 1, &event, nullptr);
      if (got == -EINTR) continue;
      if (got != 1) break;
      --busy_;
    }
    if (busy_ == 0) {
      files_.aio_contexts().give_back(context_);
    } else {
      io_destroy(context_);  // waits as well
    }
  }

  const char* name() const override { return "libaio"; }

  void submit_write(char* buffer, size_t bytes, uint64_t offset) override {
    start(free_slot(), {buffer, bytes, offset, false, bytes});
  }
  void submit_read(char* buffer, size_t bytes, uint64_t offset, size_t least) override {
    start(free_slot(), {buffer, bytes, offset, true, least});
  }

  char* wait() override {
    for (Slot& slot : slots_) {  // what was transferred on the spot
      if (slot.buffer != nullptr && slot.done) return release(slot);
    }
    while (busy_ > 0) {
      io_event event;
      const int got = io_getevents(context_, 1, 1, &event, nullptr);
      if (got == -EINTR) continue;
      if (got < 0) fail_file(-got, "waiting for transfers", path_);
      if (got == 0) continue;
      --busy_;
      Slot& slot = *static_cast<Slot*>(event.data);
      // The kernel's answer, a negative errno in an unsigned type.
      const long long result = static_cast<long>(event.res);
      if (result < 0) {
        slot.buffer = nullptr;
        fail_transfer(static_cast<int>(-result), slot.reads ? "read" : "write", path_, slot.offset, slot.bytes);
      }
      const size_t done = static_cast<size_t>(result);
      const Slot ended = slot;
      char* buffer = release(slot);
      // The rest goes synchronously: short transfers are rare, and mean a disk nearly full or the end of the file.
      if (done < ended.least) {
        if (ended.reads) {
          files_.read_all(file_, path_, buffer, ended.bytes, ended.offset, ended.least, done);
        } else {
          const size_t whole = done / kBlockBytes * kBlockBytes;  // from a block's start
          files_.write_all(file_, path_, buffer + whole, ended.bytes - whole, ended.offset + whole);
        }
      }
      return buffer;
    }
    return nullptr;
  }

 private:
  struct Slot {
    char* buffer = nullptr;  // null: free
    size_t bytes = 0;
    uint64_t offset = 0;
    bool reads = false;
    size_t least = 0;  // fewer are an error
    bool done = false;
    iocb block = {};

    Slot() = default;
    Slot(char* buffer, size_t bytes, uint64_t offset, bool reads, size_t least)
        : buffer(buffer), bytes(bytes), offset(offset), reads(reads), least(least) {}
  };

  Slot& free_slot() {
    for (Slot& slot : slots_) {
      if (slot.buffer == nullptr) return slot;
    }
    fail(ErrorKind::kRuntime, "more transfers at a time than the file was opened for");
  }

  static char* release(Slot& slot) {
    char* buffer = slot.buffer;
    slot.buffer = nullptr;
    return buffer;
  }

  void start(Slot& slot, const Slot& request) {
    Faults::CheckResult verdict = files_.faults().count(request.reads ? Call::kRead : Call::kWrite);
    while (verdict.action == Faults::Action::kError && verdict.code == EINTR) {
      verdict = files_.faults().count(request.reads ? Call::kRead : Call::kWrite);
    }
    if (verdict.action == Faults::Action::kError)
      fail_transfer(verdict.code, request.reads ? "read" : "write", path_, request.offset, request.bytes);
    size_t bytes = request.bytes;
    if (verdict.action != Faults::Action::kNone)
      bytes = request.reads ? Faults::short_read(bytes) : bytes / 2 / kBlockBytes * kBlockBytes;
    if (verdict.action == Faults::Action::kKill) {  // a torn write, then the end
      if (!request.reads && ::pwrite(file_.get(), request.buffer, bytes, static_cast<off_t>(request.offset)) < 0)
        Faults::die();
      Faults::die();
    }
    slot = request;
    if (slot.reads) {
      io_prep_pread(&slot.block, file_.get(), slot.buffer, bytes, static_cast<long long>(slot.offset));
    } else {
      io_prep_pwrite(&slot.block, file_.get(), slot.buffer, bytes, static_cast<long long>(slot.offset));
    }
    slot.block.data = &slot;
    iocb* blocks[] = {&slot.block};
    int submitted;
    do {
      submitted = io_submit(context_, 1, blocks);
    } while (submitted == -EINTR);
    if (submitted == 1) {
      ++busy_;
      return;
    }
    // EAGAIN: the kernel's queue is full for now; EINVAL: this file has no O_DIRECT after all. pread and
    // pwrite know both.
    char* buffer = release(slot);
    if (slot.reads) {
      files_.read_all(file_, path_, buffer, slot.bytes, slot.offset, slot.least);
    } else {
      files_.write_all(file_, path_, buffer, slot.bytes, slot.offset);
    }
    slot.buffer = buffer;
    slot.done = true;
  }

  Files& files_;
  const Descriptor& file_;
  const std::string path_;
  io_context_t context_;
  std::vector<Slot> slots_;  // never resized: the kernel holds addresses
  int busy_ = 0;
};

}  // namespace

std::unique_ptr<AsyncFile> open_libaio(Files& files, const Descriptor& file, const std::string& path, int depth) {
  io_context* context = files.aio_contexts().take();
  if (context == nullptr) return nullptr;
  return std::make_unique<LibaioFile>(files, file, path, context, depth);
}

std::unique_ptr<AsyncFile> open_async(Files& files, const Descriptor& file, const std::string& path, bool direct,
                                      int depth) {
  std::unique_ptr<AsyncFile> opened;
  if (direct) opened = open_libaio(files, file, path, depth);
  return opened ? std::move(opened) : open_threaded(files, file, path);
}

}  // namespace ds::io
