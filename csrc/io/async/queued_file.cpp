#include "io/async/queued_file.h"

#include <errno.h>
#include <unistd.h>

#include "base/error.h"
#include "base/ranges.h"
#include "io/memory/aligned_pool.h"
#include "io/faults.h"
#include "io/file_error.h"

namespace ds::io {

QueuedFile::QueuedFile(Files& files, const Descriptor& file, const std::string& path, int depth, bool batched)
    : files_(files), file_(file), path_(path), batched_(batched), slots_(static_cast<size_t>(depth)) {
  for (size_t i = slots_.size(); i-- > 0;) free_.push_back(i);
  prepared_.reserve(slots_.size());
}

void QueuedFile::submit_write(char* buffer, size_t bytes, uint64_t offset) {
  start({buffer, bytes, offset, false, bytes});
}

void QueuedFile::submit_read(char* buffer, size_t bytes, uint64_t offset, size_t least) {
  start({buffer, bytes, offset, true, least});
}

void QueuedFile::start(const Slot& request) {
  const Call call = request.reads ? Call::kRead : Call::kWrite;
  Faults::CheckResult verdict = files_.faults().count(call);
  while (verdict.action == Faults::Action::kError && verdict.code == EINTR) verdict = files_.faults().count(call);
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
  if (free_.empty()) fail(ErrorKind::kRuntime, "more transfers at a time than the file was opened for");
  const size_t number = free_.back();
  free_.pop_back();
  slots_[number] = request;
  prepare(number, bytes);
  prepared_.push_back(number);
  if (!batched_) flush();
}

void QueuedFile::flush() {
  if (prepared_.empty()) return;
  try {
    tell();
  } catch (...) {
    prepared_.clear();
    throw;
  }
  prepared_.clear();
}

void QueuedFile::finish_here(size_t number) {
  const Slot now = slots_[number];
  char* buffer = release(number);
  if (now.reads) {
    files_.read_all(file_, path_, buffer, now.bytes, now.offset, now.least);
  } else {
    files_.write_all(file_, path_, buffer, now.bytes, now.offset);
  }
  done_.push_back(buffer);
}

char* QueuedFile::release(size_t number) {
  char* buffer = slots_[number].buffer;
  slots_[number].buffer = nullptr;
  free_.push_back(number);
  return buffer;
}

void QueuedFile::take_completions(bool block) {
  scratch_.clear();
  collect(scratch_, block);
  busy_ -= scratch_.size();
  append(collected_, scratch_);
}

char* QueuedFile::wait() { return take(true); }
char* QueuedFile::poll() { return take(false); }

char* QueuedFile::take(bool block) {
  flush();
  if (!done_.empty()) {
    char* buffer = done_.front();
    done_.pop_front();
    return buffer;
  }
  if (collected_.empty() && busy_ > 0) take_completions(block);
  if (collected_.empty()) return nullptr;
  const Completion completion = collected_.front();
  collected_.pop_front();
  return complete(completion);
}

char* QueuedFile::complete(const Completion& completion) {
  const Slot ended = slots_[completion.slot];
  char* buffer = release(completion.slot);
  long long result = completion.result;
  // EINVAL: this file has no O_DIRECT after all; EAGAIN, EINTR: nothing was done. pread and pwrite know all three.
  if (result == -EINVAL || result == -EAGAIN || result == -EINTR) result = 0;
  if (result < 0) {
    fail_transfer(static_cast<int>(-result), ended.reads ? "read" : "write", path_, ended.offset, ended.bytes);
  }
  const auto done = static_cast<size_t>(result);
  if (done >= ended.least) return buffer;
  // The rest goes synchronously: short transfers are rare, and mean a disk nearly full or the end of the file.
  if (ended.reads) {
    files_.read_all(file_, path_, buffer, ended.bytes, ended.offset, ended.least, done);
  } else {
    const size_t whole = done / kBlockBytes * kBlockBytes;  // from a block's start
    files_.write_all(file_, path_, buffer + whole, ended.bytes - whole, ended.offset + whole);
  }
  return buffer;
}

void QueuedFile::drain() {
  try {
    while (busy_ > 0) take_completions(true);
  } catch (const std::exception&) {  // the waiting caller has had the error; the context is destroyed instead
  }
}

}  // namespace ds::io
