// Transfers by pread and pwrite on threads.
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "base/condition_variable.h"
#include "io/async/async_file.h"

namespace ds::io {
namespace {

// pread and pwrite on threads of its own: for files without O_DIRECT, where libaio would block in submit, and for
// kernels without the others. One thread transfers in the order of the requests.
class ThreadedFile : public AsyncFile {
 public:
  ThreadedFile(Files& files, const Descriptor& file, const std::string& path, int threads)
      : files_(files), file_(file), path_(path) {
    for (int i = 0; i < threads; ++i) workers_.emplace_back([this] { run(); });
  }

  ~ThreadedFile() override {
    {
      std::lock_guard guard(lock_);
      ending_ = true;
    }
    changed_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  const char* name() const override { return "pwrite"; }

  void submit_write(char* buffer, size_t bytes, uint64_t offset) override { add({buffer, bytes, offset, false, 0}); }
  void submit_read(char* buffer, size_t bytes, uint64_t offset, size_t least) override {
    add({buffer, bytes, offset, true, least});
  }

  char* wait() override { return take(true); }
  char* poll() override { return take(false); }

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
      std::lock_guard guard(lock_);
      waiting_.push_back(request);
      ++busy_;
    }
    changed_.notify_one();
  }

  char* take(bool block) {
    std::unique_lock guard(lock_);
    if (busy_ == 0) return nullptr;
    if (block) done_changed_.wait(guard, [this] { return error_ || !done_.empty(); });
    if (error_) std::rethrow_exception(error_);
    if (done_.empty()) return nullptr;
    char* buffer = done_.front();
    done_.pop_front();
    --busy_;
    return buffer;
  }

  void run() {
    std::unique_lock guard(lock_);
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
      if (!error) {
        done_.push_back(request.buffer);
      } else if (!error_) {
        error_ = error;
      }
      done_changed_.notify_all();
    }
  }

  Files& files_;
  const Descriptor& file_;
  const std::string path_;
  std::mutex lock_;
  ConditionVariable changed_, done_changed_;
  std::deque<Request> waiting_;
  std::deque<char*> done_;
  std::exception_ptr error_;
  int busy_ = 0;
  bool ending_ = false;
  std::vector<std::thread> workers_;  // last: they use all of the above
};

}  // namespace

std::unique_ptr<AsyncFile> open_threaded(Files& files, const Descriptor& file, const std::string& path, int threads) {
  return std::make_unique<ThreadedFile>(files, file, path, threads);
}

}  // namespace ds::io
