#include "io/async/uring_rings.h"

#include <string.h>
#include <unistd.h>

#include "io/async/uring_type.h"

namespace ds::io {
namespace {

#ifdef DS_WITH_URING
int ring_entries(int depth) {
  int room = 64;
  while (room < depth) room *= 2;
  return room;
}

// Whether the kernel has reads and writes at offsets: those of 5.1 to 5.5 have a ring, and only vectored ones.
bool has_reads(io_uring* ring) {
  io_uring_probe* probe = io_uring_get_probe_ring(ring);
  if (probe == nullptr) return false;
  const bool both =
      io_uring_opcode_supported(probe, IORING_OP_READ) && io_uring_opcode_supported(probe, IORING_OP_WRITE);
  io_uring_free_probe(probe);
  return both;
}
#endif

}  // namespace

UringRings::UringRings() = default;

#ifdef DS_WITH_URING

UringRings::~UringRings() {
  if (owner_ != getpid()) {  // closed with the process: their memory is the parent's, too
    for (auto& [depth, rings] : free_) {
      for (auto& ring : rings) static_cast<void>(ring.release());
    }
    return;
  }
  for (auto& [depth, rings] : free_) {
    for (auto& ring : rings) io_uring_queue_exit(ring.get());
  }
}

std::unique_ptr<io_uring> UringRings::take(int depth) {
  const int entries = ring_entries(depth);
  std::lock_guard guard(lock_);
  if (owner_ != getpid()) {
    for (auto& [other, rings] : free_) {
      for (auto& ring : rings) static_cast<void>(ring.release());
    }
    free_.clear();
    owner_ = getpid();
  }
  if (!refused_.empty()) return nullptr;
  auto& rings = free_[entries];
  if (!rings.empty()) {
    auto ring = std::move(rings.back());
    rings.pop_back();
    return ring;
  }
  auto ring = std::make_unique<io_uring>();
  const int code = io_uring_queue_init(static_cast<unsigned>(entries), ring.get(), 0);
  if (code < 0) {
    refused_ = std::string("io_uring_setup: ") + strerror(-code);
    return nullptr;
  }
  if (!has_reads(ring.get())) {
    io_uring_queue_exit(ring.get());
    refused_ = "this kernel's io_uring is older than 5.6";
    return nullptr;
  }
  return ring;
}

void UringRings::give_back(std::unique_ptr<io_uring> ring, int depth) {
  std::lock_guard guard(lock_);
  if (owner_ == getpid()) {
    free_[ring_entries(depth)].push_back(std::move(ring));
  } else {
    static_cast<void>(ring.release());
  }
}

#else

UringRings::~UringRings() = default;
std::unique_ptr<io_uring> UringRings::take(int depth) {
  std::lock_guard guard(lock_);
  refused_ = "built without liburing";
  return nullptr;
}
void UringRings::give_back(std::unique_ptr<io_uring> ring, int depth) {}

#endif

std::string UringRings::why_not() const {
  std::lock_guard guard(lock_);
  return refused_;
}

}  // namespace ds::io
