// Files in memory, one for each rank of a group on one host, mapped by all of them. They have no name, belong to the
// user alone, need no room in /dev/shm and vanish with the last process that has one open.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "comm/segments/shared_file.h"

namespace ds::comm {

// Facts with which another rank maps this rank's file.
struct SegmentFacts {
  SharedFile file;
  int64_t host = 0, bytes = 0;
};

// Functions by which ranks exchange facts; both are collective.
struct Rendezvous {
  std::function<std::vector<SegmentFacts>(const SegmentFacts&)> exchange;  // of all ranks, by rank
  std::function<bool(bool)> all;                                           // whether all ranks say true
};

// The one identity of a host: equal where processes may share memory and where their numbers mean the same, on one host
// in one PID namespace. Names of hosts say neither: containers and cloned machines have the same. Where the kernel does
// not tell, no other process has this one's. DS_HOST_ID in the environment makes ranks of one host believe that they
// are on several, for tests.
int64_t host_id();

class SharedSegments {
 public:
  // Collective. Every rank asks for the same `bytes`, which start as zeros. Null on all ranks where it is impossible
  // for one: several hosts or PID namespaces, /proc entries that may not be opened, too little memory, or
  // DS_PEER_MEMORY=0 in the environment.
  static std::shared_ptr<SharedSegments> create(int rank, int size, int64_t bytes, const Rendezvous& rendezvous);

  void* data(int rank) const { return mappings_[rank]->data; }
  int64_t pid(int rank) const { return mappings_[rank]->pid; }
  bool alive(int rank) const;  // its process has not ended
  int size() const { return static_cast<int>(mappings_.size()); }

 private:
  struct Mapping {
    Mapping(int64_t pid, int file, int64_t bytes);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    int64_t pid, bytes;
    void* data;  // null: it failed
  };
  std::vector<std::unique_ptr<Mapping>> mappings_;
};

}  // namespace ds::comm
