#include "comm/process_peer_memory.h"

#include <ATen/Functions.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"

namespace ds::comm {

namespace {

// The first page of each file; the region follows.
struct Header {
  std::atomic<int64_t> version;
  std::atomic<int64_t> closed;
};
constexpr int64_t kHeaderBytes = 4096;
static_assert(sizeof(Header) <= kHeaderBytes && std::atomic<int64_t>::is_always_lock_free);

class Mapping {
 public:
  Mapping(int file, int64_t bytes)
      : bytes_(bytes), base_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)) {}
  ~Mapping() {
    if (ok()) munmap(base_, bytes_);
  }
  Mapping(const Mapping&) = delete;
  bool ok() const { return base_ != MAP_FAILED; }
  Header* header() const { return static_cast<Header*>(base_); }
  void* data() const { return static_cast<char*>(base_) + kHeaderBytes; }

 private:
  int64_t bytes_;
  void* base_;
};

// Differs between hosts and between PID namespaces, where /proc/<pid> would be somebody else.
int64_t place_id() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat space {};
  stat("/proc/self/ns/pid", &space);
  return static_cast<int64_t>(std::hash<std::string>{}(boot + std::to_string(space.st_ino)) >> 2);
}

class ProcessPeerMemory : public PeerMemory {
 public:
  ProcessPeerMemory(int rank, std::vector<std::shared_ptr<Mapping>> mappings, std::vector<int64_t> pids, int64_t bytes)
      : rank_(rank), mappings_(std::move(mappings)), pids_(std::move(pids)), bytes_(bytes) {}
  ~ProcessPeerMemory() override { mappings_[rank_]->header()->closed = 1; }

  at::Tensor region(int rank) override {
    const auto mapping = mappings_[rank];
    return at::from_blob(
        mapping->data(), {bytes_}, [mapping](void*) {}, at::TensorOptions().dtype(at::kByte));
  }

  void publish() override { mappings_[rank_]->header()->version.fetch_add(1, std::memory_order_release); }

  void await(int64_t version) override {
    for (size_t rank = 0; rank < mappings_.size(); ++rank) {
      const Header* header = mappings_[rank]->header();
      for (int64_t round = 0; header->version.load(std::memory_order_acquire) < version; ++round) {
        if (round < 200) {
          std::this_thread::yield();
          continue;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(50));
        if (round % 1000 == 0) check_alive(static_cast<int>(rank), *header);
      }
    }
  }

 private:
  void check_alive(int rank, const Header& header) const {
    if (kill(static_cast<pid_t>(pids_[rank]), 0) != 0 && errno == ESRCH)
      fail(ErrorKind::kRuntime, "rank ", rank, " (process ", pids_[rank],
           ") has ended while its part of the parameters was waited for");
    if (header.closed.load())
      fail(ErrorKind::kRuntime, "rank ", rank, " (process ", pids_[rank],
           ") has closed its engine while its part of the parameters was waited for");
  }

  int rank_;
  std::vector<std::shared_ptr<Mapping>> mappings_;
  std::vector<int64_t> pids_;
  int64_t bytes_;
};

}  // namespace

PeerMemoryPtr process_peer_memory(Communicator& group, int64_t bytes) {
  const int size = group.size(), me = group.rank();
  const int64_t total = kHeaderBytes + std::max<int64_t>(bytes, 1);
  const char* wish = std::getenv("DS_PEER_MEMORY");  // 0: for tests of what several hosts do, and for odd containers
  const bool wanted = !wish || std::string(wish) != "0";
  const int file = wanted ? memfd_create("deepspeed-shard", MFD_CLOEXEC) : -1;
  const bool made = file >= 0 && ftruncate(file, total) == 0;
  at::Tensor facts = at::zeros({size, 4}, at::kLong);
  auto* mine = facts.data_ptr<int64_t>() + 4 * me;
  mine[0] = made ? getpid() : -1;
  mine[1] = file;
  mine[2] = place_id();
  mine[3] = bytes;
  group.all_gather(facts.select(0, me), facts)->wait();

  const auto* all = facts.data_ptr<int64_t>();
  std::vector<std::shared_ptr<Mapping>> mappings;
  std::vector<int64_t> pids;
  bool ok = true;
  for (int rank = 0; rank < size && ok; ++rank) {
    const int64_t* theirs = all + 4 * rank;
    ok = theirs[0] > 0 && theirs[2] == mine[2] && theirs[3] == bytes;
    if (!ok) break;
    const std::string path = "/proc/" + std::to_string(theirs[0]) + "/fd/" + std::to_string(theirs[1]);
    const int opened = rank == me ? file : open(path.c_str(), O_RDWR | O_CLOEXEC);
    ok = opened >= 0;
    if (!ok) break;
    mappings.push_back(std::make_shared<Mapping>(opened, total));
    ok = mappings.back()->ok();
    if (rank != me) close(opened);
    pids.push_back(theirs[0]);
  }
  at::Tensor agreed = at::full({1}, ok ? 1 : 0, at::kInt);
  group.all_reduce(agreed, ReduceOp::kMin)->wait();  // nobody closes its file before all have opened it
  if (file >= 0) close(file);
  if (agreed.item<int>() == 0) return nullptr;
  return std::make_shared<ProcessPeerMemory>(me, std::move(mappings), std::move(pids), bytes);
}

}  // namespace ds::comm
