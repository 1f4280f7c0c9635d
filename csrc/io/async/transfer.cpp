#include "io/async/transfer.h"

#include <string.h>

#include <algorithm>
#include <optional>

#include "base/error.h"
#include "base/ranges.h"
#include "io/memory/aligned_pool.h"
#include "io/file_error.h"

namespace ds::io {
namespace {

constexpr int kDeepest = 4096;
constexpr size_t kLargestBlock = size_t{1} << 30;  // one transfer of Linux ends below 2 GiB
constexpr size_t kBounceBytes = 64 << 20;          // host memory through which remote memory passes, at most
constexpr size_t kSmallBounce = 1 << 20;

class HostBytes : public RemoteMemory {
 public:
  explicit HostBytes(char* data) : data_(data) {}
  void load(char* host, uint64_t at, size_t bytes) override { memcpy(host, data_ + at, bytes); }
  void store(const char* host, uint64_t at, size_t bytes) override { memcpy(data_ + at, host, bytes); }

 private:
  char* data_;
};

// One call of read_span or write_span.
class SpanTransfer {
 public:
  SpanTransfer(BlockFile& file, const Span& span, uint64_t offset, bool reads, const TransferOptions& options)
      : file_(file), span_(span), offset_(offset), reads_(reads), options_(options) {}

  void run() {
    if (span_.bytes == 0) return;
    uint64_t head = 0;
    uint64_t body = span_.bytes;
    if (file_.has_direct()) {
      head = std::min<uint64_t>(span_.bytes, round_up(offset_, kBlockBytes) - offset_);
      body = (span_.bytes - head) / kBlockBytes * kBlockBytes;
    }
    through_cache(0, head);
    transfer_body(head, body);
    through_cache(head + body, span_.bytes - head - body);
  }

 private:
  // Less than a block.
  void through_cache(uint64_t from, uint64_t bytes) {
    if (bytes == 0) return;
    char* memory = span_.host == nullptr ? nullptr : span_.host + from;
    std::optional<AlignedPool> scratch;
    if (memory == nullptr) memory = scratch.emplace(1, bytes).take();
    Files& files = file_.files();
    if (reads_) {
      files.read_all(file_.buffered(), file_.path(), memory, bytes, offset_ + from, bytes);
      if (span_.remote != nullptr) span_.remote->store(memory, span_.begin + from, bytes);
    } else {
      if (span_.remote != nullptr) span_.remote->load(memory, span_.begin + from, bytes);
      files.write_all(file_.buffered(), file_.path(), memory, bytes, offset_ + from);
    }
  }

  void transfer_body(uint64_t from, uint64_t bytes) {
    if (bytes == 0) return;
    size_t block = std::min<uint64_t>(options_.block_bytes, bytes);
    if (file_.has_direct()) block = round_up(block, kBlockBytes);
    const uint64_t blocks = (bytes + block - 1) / block;
    int depth = static_cast<int>(std::min<uint64_t>(static_cast<uint64_t>(options_.queue_depth), blocks));
    std::optional<HostBytes> unaligned;
    RemoteMemory* remote = span_.remote;
    uint64_t begin = span_.begin + from;
    char* host = span_.host == nullptr ? nullptr : span_.host + from;
    if (host != nullptr && reinterpret_cast<uintptr_t>(host) % file_.address_multiple() != 0) {
      remote = &unaligned.emplace(host);
      begin = 0;
      host = nullptr;
    }
    std::optional<AlignedPool> bounce;
    if (remote != nullptr) {
      depth =
          static_cast<int>(std::min<uint64_t>(static_cast<uint64_t>(depth), std::max<size_t>(kBounceBytes / block, 2)));
      bounce.emplace(static_cast<size_t>(depth), block);
    }
    AsyncOptions how{options_.backend, !options_.single_submit, threads_for(depth)};
    const auto async = open_async(file_.files(), file_.direct(), file_.path(), file_.has_direct(), depth, how);

    uint64_t next = 0;  // of the body, what is not asked for yet
    int busy = 0;
    std::vector<std::pair<char*, uint64_t>> offsets;  // of bounce buffers on their way
    const auto start = [&] {
      const auto now = static_cast<size_t>(std::min<uint64_t>(block, bytes - next));
      char* buffer = host + next;
      if (remote != nullptr) {
        buffer = bounce->take();
        if (reads_) {
          offsets.emplace_back(buffer, next);
        } else {
          remote->load(buffer, begin + next, now);
        }
      }
      if (reads_) {
        async->submit_read(buffer, now, offset_ + from + next, now);
      } else {
        async->submit_write(buffer, now, offset_ + from + next);
      }
      next += now;
      ++busy;
    };
    const auto end = [&](char* buffer) {
      --busy;
      if (remote == nullptr) return;
      if (reads_) {
        const auto found = find_if(offsets, [&](const auto& entry) { return entry.first == buffer; });
        const uint64_t at = found->second;
        *found = offsets.back();
        offsets.pop_back();
        remote->store(buffer, begin + at, static_cast<size_t>(std::min<uint64_t>(block, bytes - at)));
      }
      bounce->give_back(buffer);
    };

    const int refill_at = options_.overlap_events ? depth - 1 : depth / 2;
    while (next < bytes || busy > 0) {
      while (next < bytes && busy < depth) start();
      async->flush();
      do {
        end(async->wait());
        if (next < bytes) {
          while (char* buffer = busy > 0 ? async->poll() : nullptr) end(buffer);
        }
      } while (busy > 0 && (next == bytes || busy > refill_at));
    }
  }

  // Threads for transfers: one for each request, up to a limit.
  static int threads_for(int depth) { return std::clamp(depth, 1, 4); }

  BlockFile& file_;
  const Span span_;
  const uint64_t offset_;
  const bool reads_;
  const TransferOptions& options_;
};

}  // namespace

void check(const TransferOptions& options) {
  if (options.block_bytes < 1 || options.block_bytes > kLargestBlock) {
    fail(ErrorKind::kValue, "block_size must be from 1 to ", kLargestBlock, " bytes, got ", options.block_bytes);
  }
  if (options.queue_depth < 1 || options.queue_depth > kDeepest) {
    fail(ErrorKind::kValue, "queue_depth must be from 1 to ", kDeepest, ", got ", options.queue_depth);
  }
}

void read_span(BlockFile& file, const Span& span, uint64_t offset, const TransferOptions& options) {
  SpanTransfer(file, span, offset, true, options).run();
}

void write_span(BlockFile& file, const Span& span, uint64_t offset, const TransferOptions& options) {
  SpanTransfer(file, span, offset, false, options).run();
}

void compare_span(BlockFile& file, const Span& span, uint64_t offset) {
  AlignedPool pool(2, kSmallBounce);
  char* found = pool.take();
  char* wanted = pool.take();
  for (uint64_t at = 0; at < span.bytes; at += kSmallBounce) {
    const auto now = static_cast<size_t>(std::min<uint64_t>(kSmallBounce, span.bytes - at));
    file.files().read_all(file.buffered(), file.path(), found, now, offset + at, now);
    const char* memory = span.host == nullptr ? wanted : span.host + at;
    if (span.host == nullptr) span.remote->load(wanted, span.begin + at, now);
    if (memcmp(found, memory, now) == 0) continue;
    const size_t first = static_cast<size_t>(std::mismatch(found, found + now, memory).first - found);
    fail(ErrorKind::kRuntime, "validation of ", file.path(), " failed: byte ", offset + at + first,
         " of the file is not byte ", at + first, " of the tensor. Something else writes to one of them.");
  }
}

std::vector<std::pair<uint64_t, uint64_t>> parts_of(uint64_t offset, uint64_t bytes, int parts) {
  std::vector<std::pair<uint64_t, uint64_t>> made;
  const uint64_t share =
      round_up((bytes + static_cast<uint64_t>(parts) - 1) / static_cast<uint64_t>(parts), kBlockBytes);
  uint64_t begin = offset;
  const uint64_t end = offset + bytes;
  while (begin < end) {
    const uint64_t next = std::min<uint64_t>(end, (begin + share + kBlockBytes - 1) / kBlockBytes * kBlockBytes);
    made.emplace_back(begin, next - begin);
    begin = next;
  }
  return made;
}

}  // namespace ds::io
