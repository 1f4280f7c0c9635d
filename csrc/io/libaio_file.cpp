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
    io_destroy(context_);  // waits as well
  }

  const char* name() const override { return "libaio"; }

  void submit(char* buffer, size_t bytes, uint64_t offset) override {
    for (Slot& slot : slots_) {
      if (slot.buffer != nullptr) continue;
      start(slot, {buffer, buffer, bytes, offset});
      return;
    }
    fail(ErrorKind::kRuntime, "more writes at a time than the file was opened for");
  }

  char* wait() override {
    for (Slot& slot : slots_) {  // what was written on the spot
      if (slot.buffer != nullptr && slot.done) return release(slot);
    }
    while (busy_ > 0) {
      io_event event;
      const int got = io_getevents(context_, 1, 1, &event, nullptr);
      if (got == -EINTR) continue;
      if (got < 0) fail_file(-got, "waiting for writes", path_);
      if (got == 0) continue;
      --busy_;
      Slot& slot = *static_cast<Slot*>(event.data);
      // The kernel's answer, a negative errno in an unsigned type.
      const long long result = static_cast<long>(event.res);
      if (result < 0) {
        slot.buffer = nullptr;
        fail_file(static_cast<int>(-result), "write", path_, slot.offset + slot.bytes);
      }
      const size_t written = static_cast<size_t>(result);
      if (written < slot.bytes) {
        // The rest goes out synchronously, from a block's start: short writes are rare, and mean a disk nearly full.
        const size_t whole = written / kBlockBytes * kBlockBytes;
        char* rest = slot.at + whole;
        const size_t rest_bytes = slot.bytes - whole;
        const uint64_t rest_offset = slot.offset + whole;
        char* buffer = release(slot);
        files_.write_all(file_, path_, rest, rest_bytes, rest_offset);
        return buffer;
      }
      return release(slot);
    }
    return nullptr;
  }

 private:
  struct Slot {
    char* buffer = nullptr;  // null: free
    char* at = nullptr;
    size_t bytes = 0;
    uint64_t offset = 0;
    bool done = false;
    iocb block = {};

    Slot() = default;
    Slot(char* buffer, char* at, size_t bytes, uint64_t offset)
        : buffer(buffer), at(at), bytes(bytes), offset(offset) {}
  };

  static char* release(Slot& slot) {
    char* buffer = slot.buffer;
    slot.buffer = nullptr;
    return buffer;
  }

  void start(Slot& slot, const Slot& request) {
    const Faults::Verdict verdict = files_.faults().count(Call::kWrite);
    if (verdict.action == Faults::Action::kError)
      fail_file(verdict.code, "write", path_, request.offset + request.bytes);
    size_t bytes = request.bytes;
    if (verdict.action != Faults::Action::kNone) bytes = bytes / 2 / kBlockBytes * kBlockBytes;
    if (verdict.action == Faults::Action::kKill) {  // a torn write, then the end
      if (::pwrite(file_.get(), request.at, bytes, static_cast<off_t>(request.offset)) < 0) Faults::die();
      Faults::die();
    }
    slot = request;
    io_prep_pwrite(&slot.block, file_.get(), slot.at, bytes, static_cast<long long>(slot.offset));
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
    // EAGAIN: the kernel's queue is full for now; EINVAL: this file has no O_DIRECT after all. pwrite knows both.
    files_.write_all(file_, path_, slot.at, slot.bytes, slot.offset);
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
  io_context_t context = nullptr;
  if (io_setup(depth, &context) != 0) return nullptr;
  return std::make_unique<LibaioFile>(files, file, path, context, depth);
}

std::unique_ptr<AsyncFile> open_async(Files& files, const Descriptor& file, const std::string& path, bool direct,
                                      int depth) {
  std::unique_ptr<AsyncFile> opened;
  if (direct) opened = open_libaio(files, file, path, depth);
  return opened ? std::move(opened) : open_threaded(files, file, path);
}

}  // namespace ds::io
