// The common part of io_uring and libaio: requests in slots, faults on order, short transfers that go on.
#pragma once
#include <deque>
#include <string>
#include <vector>

#include "io/async/async_file.h"

namespace ds::io {

class QueuedFile : public AsyncFile {
 public:
  QueuedFile(Files& files, const Descriptor& file, const std::string& path, int depth, bool batched);

  void submit_write(char* buffer, size_t bytes, uint64_t offset) override;
  void submit_read(char* buffer, size_t bytes, uint64_t offset, size_t least) override;
  void flush() override;
  char* wait() override;
  char* poll() override;

 protected:
  struct Slot {
    char* buffer = nullptr;  // null: free
    size_t bytes = 0;
    uint64_t offset = 0;
    bool reads = false;
    size_t least = 0;  // fewer are an error
  };
  struct Completion {
    size_t slot;
    long long result;  // bytes, or a negative errno
  };

  // Fills the kernel's form for `bytes` of a slot: less than the slot has where a fault on order says so.
  virtual void prepare(size_t slot, size_t bytes) = 0;
  // Tells the kernel of everything in prepared(), oldest first, each of them begun() or finish_here().
  virtual void tell() = 0;
  // Appends what is complete; with `block` waits for at least one.
  virtual void collect(std::vector<Completion>& into, bool block) = 0;

  const std::vector<size_t>& prepared() const { return prepared_; }
  void begun(size_t requests) { busy_ += requests; }
  // In this thread, by pread and pwrite, which know files whose O_DIRECT is none after all.
  void finish_here(size_t slot);
  const Slot& slot(size_t number) const { return slots_[number]; }
  size_t busy() const { return busy_; }
  void take_completions(bool block);  // into collected_
  void drain();                       // for destructors of derived classes; errors are dropped

  Files& files_;
  const Descriptor& file_;
  const std::string path_;

 private:
  void start(const Slot& request);
  char* take(bool block);
  char* complete(const Completion& completion);
  char* release(size_t slot);

  const bool batched_;
  std::vector<Slot> slots_;  // never resized: the kernel's forms stand beside it
  std::vector<size_t> free_;
  std::vector<size_t> prepared_;
  std::deque<Completion> collected_;
  std::deque<char*> done_;
  std::vector<Completion> scratch_;
  size_t busy_ = 0;
};

}  // namespace ds::io
