#include "storage/block_copies.h"

#include <string.h>

#include "storage/alignment.h"
#include "storage/flat_view.h"
#include "storage/waited.h"

namespace ds::storage {
namespace {

// Whether the host addresses the copy: it is in its memory, or it would be, in a step that is planned.
bool on_host(const Staging& staging) { return staging.medium == Medium::kHost || staging.memory.device().is_cpu(); }

char* address(const at::Tensor& memory) { return static_cast<char*>(memory.data_ptr()); }

void copy(const at::Tensor& to, int64_t to_offset, const at::Tensor& from, int64_t from_offset, int64_t bytes,
          bool wait = true) {
  if (bytes == 0) return;
  if (to.device().is_cpu() && from.device().is_cpu()) {
    memcpy(address(to) + to_offset, address(from) + from_offset, static_cast<size_t>(bytes));
    return;
  }
  flat_view(to, to.storage_offset() + to_offset, at::kByte, bytes)
      .copy_(flat_view(from, from.storage_offset() + from_offset, at::kByte, bytes), /*non_blocking=*/!wait);
}

}  // namespace

// A copy of one block in host memory, for as long as this object lives.
class BlockCopies::HostCopy {
 public:
  HostCopy(BlockCopies& copies, const Plane& plane, int32_t block, bool may_wait)
      : copies_(copies), staging_(plane.new_copy(block, block + 1, Medium::kHost)) {
    auto lock = copies_.lock_.hold();
    copies_.memory_.take(lock, *staging_, may_wait);
  }
  ~HostCopy() {
    const auto lock = copies_.lock_.hold();
    copies_.memory_.give(*staging_);
  }
  HostCopy(const HostCopy&) = delete;
  HostCopy& operator=(const HostCopy&) = delete;

  const Staging& operator*() const { return *staging_; }

 private:
  BlockCopies& copies_;
  const StagingPtr staging_;
};

void BlockCopies::transfer(const Plane& plane, const PlanePart& part, int32_t block, const Staging& staging, bool fetch,
                           bool in_background) {
  double seconds = 0;
  {
    const Waited timed(seconds);
    transfer_block(plane, part, block, staging, fetch, in_background);
  }
  const auto lock = lock_.hold();
  MediumUsage& used = memory_.used(part.medium);
  const double end = std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
  memory_.add({plane.name, used.name, fetch, plane.bytes(block, block + 1), end - seconds, end});
  (fetch ? used.read_bytes : used.written_bytes) += plane.bytes(block, block + 1);
  (fetch ? used.read_seconds : used.write_seconds) += seconds;
}

void BlockCopies::transfer_block(const Plane& plane, const PlanePart& part, int32_t block, const Staging& staging,
                                 bool fetch, bool in_background) {
  const int64_t bytes = plane.bytes(block, block + 1);
  const int64_t here = staging.offset + plane.bytes(staging.first, block);
  if (part.memory.defined()) {
    const int64_t there = plane.bytes(part.first, block);
    if (fetch) return copy(staging.memory, here, part.memory, there, bytes);
    return copy(part.memory, there, staging.memory, here, bytes);
  }
  const auto index = static_cast<size_t>(block - part.first);
  if (!on_host(staging) && part.part->reaches_device()) {
    c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).synchronize();
    return fetch ? part.part->read_device(index, staging.memory, here)
                 : part.part->write_device(index, staging.memory, here);
  }
  const bool whole = (here - staging.offset) % kAlignment == 0 && (block + 1 == staging.end || bytes % kAlignment == 0);
  if (on_host(staging) && (whole || part.part->any_address())) {
    char* data = address(staging.memory) + here;
    return fetch ? part.part->read(index, data) : part.part->write(index, data);
  }
  // The copy is on a device, or the block has no aligned address in it.
  const HostCopy bounce(*this, plane, block, /*may_wait=*/!in_background);
  char* data = address((*bounce).memory) + (*bounce).offset;
  if (fetch) {
    part.part->read(index, data);
    copy(staging.memory, here, (*bounce).memory, (*bounce).offset, bytes);
  } else {
    copy((*bounce).memory, (*bounce).offset, staging.memory, here, bytes);
    part.part->write(index, data);
  }
}

void BlockCopies::copy_plane(const Plane& plane, const std::vector<PlanePart>& to, bool wait_each) {
  for (const PlanePart& target : to) {
    for (int32_t b = target.first; b < target.end; ++b) {
      const PlanePart& source = plane.part_of(b);
      const int64_t there = plane.bytes(target.first, b);
      if (plane.absent(b) && (!target.part || target.memory.defined())) continue;  // there is nothing to copy
      if (source.memory.defined() && target.memory.defined()) {
        copy(target.memory, there, source.memory, plane.bytes(source.first, b), plane.bytes(b, b + 1), wait_each);
        continue;
      }
      // From or to something that is read block by block: one block at a time through the host.
      const HostCopy bounce(*this, plane, b, /*may_wait=*/true);
      if (plane.absent(b)) {
        if ((*bounce).memory.device().is_cpu())  // else the move is planned
          memset(address((*bounce).memory) + (*bounce).offset, 0, static_cast<size_t>(plane.bytes(b, b + 1)));
      } else {
        transfer(plane, source, b, *bounce, /*fetch=*/true, /*in_background=*/false);
      }
      transfer(plane, target, b, *bounce, /*fetch=*/false, /*in_background=*/false);
    }
  }
}

}  // namespace ds::storage
