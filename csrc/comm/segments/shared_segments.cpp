#include "comm/segments/shared_segments.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>

#include "base/process.h"

namespace ds::comm {

namespace {

std::string nonce_of_process() {
  static const std::string made = [] {
    uint64_t number = 0;
    const bool random = getrandom(&number, sizeof(number), 0) == sizeof(number);
    return std::to_string(random ? number : static_cast<uint64_t>(getpid()));
  }();
  return made;
}

}  // namespace

int64_t host_id() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat space {};
  const bool told =
      stat("/proc/self/ns/pid", &space) == 0 && !boot.empty();  // in another namespace /proc/<pid> is another process
  if (!told) boot += nonce_of_process();
  const char* wish = std::getenv("DS_HOST_ID");
  const std::string text = boot + std::to_string(space.st_ino) + (wish ? wish : "");
  return static_cast<int64_t>(std::hash<std::string>{}(text) >> 2);
}

SharedSegments::Mapping::Mapping(int64_t pid, int file, int64_t bytes)
    : pid(pid), bytes(bytes), data(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)) {
  if (data == MAP_FAILED) data = nullptr;
}

SharedSegments::Mapping::~Mapping() {
  if (data) munmap(data, bytes);
}

bool SharedSegments::alive(int rank) const { return !process_ended(mappings_[rank]->pid); }

std::shared_ptr<SharedSegments> SharedSegments::create(int rank, int size, int64_t bytes,
                                                       const Rendezvous& rendezvous) {
  bytes = std::max<int64_t>(bytes, 1);
  const char* wish = std::getenv("DS_PEER_MEMORY");  // 0: for tests of what several hosts do, and for odd containers
  const bool wanted = !wish || std::string(wish) != "0";
  const SharedFile own = wanted ? make_shared_file() : SharedFile();
  const int file = static_cast<int>(own.file);
  SegmentFacts mine;
  // Taken now: a page that is missing later would end the process with a bus error.
  if (file >= 0 && posix_fallocate(file, 0, bytes) == 0) mine.file = own;
  mine.host = host_id();
  mine.bytes = bytes;
  const std::vector<SegmentFacts> all = rendezvous.exchange(mine);

  auto made_segments = std::make_shared<SharedSegments>();
  bool ok = static_cast<int>(all.size()) == size;
  for (int other = 0; other < size && ok; ++other) {
    const SegmentFacts& theirs = all[other];
    ok = theirs.file.file >= 0 && theirs.host == mine.host && theirs.bytes == bytes;
    if (!ok) break;
    const int opened = other == rank ? file : open_shared_file(theirs.file);
    ok = opened >= 0;
    if (!ok) break;
    made_segments->mappings_.push_back(std::make_unique<Mapping>(theirs.file.pid, opened, bytes));
    ok = made_segments->mappings_.back()->data != nullptr;
    if (other != rank) close(opened);
  }
  const bool everywhere = rendezvous.all(ok);  // no rank closes its file before all have opened it
  if (file >= 0) close(file);
  return everywhere ? made_segments : nullptr;
}

}  // namespace ds::comm
