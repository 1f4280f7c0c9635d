// Rings of io_uring, kept for the next file; and whether this machine has them at all.
#pragma once
#include <sys/types.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

struct io_uring;

namespace ds::io {

class UringRings {
 public:
  UringRings();
  ~UringRings();
  UringRings(const UringRings&) = delete;
  UringRings& operator=(const UringRings&) = delete;

  // For `depth` transfers at a time; null where the kernel refuses: an old one, a container (seccomp),
  // kernel.io_uring_disabled, or this was built without liburing. A refusal is remembered.
  std::unique_ptr<io_uring> take(int depth);

  // Only with nothing on its way and nothing prepared; `depth` as it was taken for.
  void give_back(std::unique_ptr<io_uring> ring, int depth);

  // The reason why take() gave null the last time.
  std::string why_not() const;

 private:
  mutable std::mutex lock_;
  std::map<int, std::vector<std::unique_ptr<io_uring>>> free_;  // by depth, in powers of two
  std::string refused_;
  pid_t owner_ = 0;  // a fork shares the memory of rings: it has none of its parent's
};

}  // namespace ds::io
