#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "io/async_file.h"

namespace ds::io {
namespace {

// pread and pwrite on a thread of its own: for files without O_DIRECT, where libaio would block in submit, and for
// kernels without libaio.
class ThreadedFile : public AsyncFile {
 public:
  ThreadedFile(Files& files, const Descriptor& file, const std::string& path)
      : files_(files), file_(file), path_(path), worker_([this] { run(); }) {}

  ~ThreadedFile() override {
    {
      std::lock_guard<std::mutex> guard(lock_);
      ending_ = true;
    }
    changed_.notify_all();
    worker_.join();
  }

  const char* name() const override { return "pwrite"; }

  void submit_write(char* buffer, size_t bytes, uint64_t offset) override { add({buffer, bytes, offset, false, 0}); }
  void submit_read(char* buffer, size_t bytes, uint64_t offset, size_t least) override {
    add({buffer, bytes, offset, true, least});
  }

  char* wait() override {
    std::unique_lock<std::mutex> guard(lock_);
    if (busy_ == 0) return nullptr;
    changed_.wait(guard, [this] { return error_ || !done_.empty(); });
    if (error_) std::rethrow_exception(error_);
    char* buffer = done_.front();
    done_.pop_front();
    --busy_;
    return buffer;
  }

 private:
  struct Request {
    char* buffer;
    size_t bytes;
    uint64_t offset;
    bool reads;
    size_t least;
  };

  void add(const Request& request) {
    {
      std::lock_guard<std::mutex> guard(lock_);
      waiting_.push_back(request);
      ++busy_;
    }
    changed_.notify_all();
  }

  void run() {
    std::unique_lock<std::mutex> guard(lock_);
    for (;;) {
      changed_.wait(guard, [this] { return ending_ || !waiting_.empty(); });
      if (ending_) return;
      if (error_) {
        waiting_.clear();  // after an error nothing more is transferred
        continue;
      }
      const Request request = waiting_.front();
      waiting_.pop_front();
      guard.unlock();
      std::exception_ptr error;
      try {
        if (request.reads) {
          files_.read_all(file_, path_, request.buffer, request.bytes, request.offset, request.least);
        } else {
          files_.write_all(file_, path_, request.buffer, request.bytes, request.offset);
        }
      } catch (...) {
        error = std::current_exception();
      }
      guard.lock();
      if (error)
        error_ = error;
      else
        done_.push_back(request.buffer);
      changed_.notify_all();
    }
  }

  Files& files_;
  const Descriptor& file_;
  const std::string path_;
  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<Request> waiting_;
  std::deque<char*> done_;
  std::exception_ptr error_;
  int busy_ = 0;
  bool ending_ = false;
  std::thread worker_;  // last: it uses all of the above
};

}  // namespace

std::unique_ptr<AsyncFile> open_threaded(Files& files, const Descriptor& file, const std::string& path) {
  return std::make_unique<ThreadedFile>(files, file, path);
}

}  // namespace ds::io
