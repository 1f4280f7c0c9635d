// Transfers by io_uring.
#include <errno.h>

#include "io/file_error.h"
#include "io/async/queued_file.h"
#include "io/async/uring_rings.h"
#include "io/async/uring_type.h"

#ifdef DS_WITH_URING

namespace ds::io {
namespace {

class UringFile : public QueuedFile {
 public:
  UringFile(Files& files, const Descriptor& file, const std::string& path, std::unique_ptr<io_uring> ring, int depth,
            bool batched)
      : QueuedFile(files, file, path, depth, batched), ring_(std::move(ring)), depth_(depth) {}

  ~UringFile() override {
    try {
      flush();  // prepared requests stay in the ring: the next file would start them
    } catch (const std::exception&) {
    }
    drain();
    if (busy() == 0 && io_uring_sq_ready(ring_.get()) == 0) {
      files_.uring_rings().give_back(std::move(ring_), depth_);
    } else {
      io_uring_queue_exit(ring_.get());  // cancels, and waits
    }
  }

  const char* name() const override { return "io_uring"; }

 private:
  void prepare(size_t number, size_t bytes) override {
    const Slot& request = slot(number);
    io_uring_sqe* entry = io_uring_get_sqe(ring_.get());  // never null: a ring has room for `depth`
    if (request.reads) {
      io_uring_prep_read(entry, file_.get(), request.buffer, static_cast<unsigned>(bytes), request.offset);
    } else {
      io_uring_prep_write(entry, file_.get(), request.buffer, static_cast<unsigned>(bytes), request.offset);
    }
    io_uring_sqe_set_data64(entry, number);
  }

  void tell() override {
    for (size_t left = prepared().size(); left > 0;) {
      const int taken = io_uring_submit(ring_.get());
      if (taken == -EINTR) continue;
      if (taken > 0) {
        begun(static_cast<size_t>(taken));
        left -= static_cast<size_t>(taken);
        continue;
      }
      // EAGAIN, EBUSY: the kernel is short of memory, or of room for completions. What is complete makes room.
      if (busy() == 0) fail_file(taken == 0 ? EAGAIN : -taken, "starting transfers", path_);
      take_completions(true);
    }
  }

  void collect(std::vector<Completion>& into, bool block) override {
    io_uring_cqe* first = nullptr;
    int code;
    do {
      code = block ? io_uring_wait_cqe(ring_.get(), &first) : io_uring_peek_cqe(ring_.get(), &first);
    } while (code == -EINTR);
    if (code == -EAGAIN && !block) return;
    if (code < 0) fail_file(-code, "waiting for transfers", path_);
    unsigned head;
    unsigned count = 0;
    io_uring_cqe* entry;
    io_uring_for_each_cqe(ring_.get(), head, entry) {
      into.push_back({static_cast<size_t>(entry->user_data), entry->res});
      ++count;
    }
    io_uring_cq_advance(ring_.get(), count);
  }

  std::unique_ptr<io_uring> ring_;
  const int depth_;
};

}  // namespace

std::unique_ptr<AsyncFile> open_uring(Files& files, const Descriptor& file, const std::string& path, int depth,
                                      bool batched) {
  std::unique_ptr<io_uring> ring = files.uring_rings().take(depth);
  if (!ring) return nullptr;
  return std::make_unique<UringFile>(files, file, path, std::move(ring), depth, batched);
}

}  // namespace ds::io

#else

namespace ds::io {

std::unique_ptr<AsyncFile> open_uring(Files& files, const Descriptor&, const std::string&, int depth, bool) {
  return files.uring_rings().take(depth), nullptr;  // the pool remembers the reason
}

}  // namespace ds::io

#endif
