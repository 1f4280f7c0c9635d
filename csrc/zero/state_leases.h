// Keeps masters and optimizer states as they are while somebody copies them: they are planes, and who copies them in
// the background holds read leases.
#pragma once
#include <cstdint>
#include <mutex>
#include <vector>

#include "storage/shard_storage.h"
#include "zero/param_store.h"

namespace ds::zero {

class StateLeases {
 public:
  // Both outlive it.
  StateLeases(storage::ShardStorage& storage, const ParamStore& store) : storage_(storage), store_(store) {}

  // Read leases of all masters and states that there are, until let_go(), which another thread may call. May be nested.
  void hold();
  void let_go();
  // Until nobody holds them. Who changes states, or hands out memory in which somebody could, waits first.
  void wait();
  // The states go: so do the planes.
  void clear();

 private:
  struct State {
    storage::PlaneId plane;
    at::Tensor memory;
  };

  void follow();

  storage::ShardStorage& storage_;
  const ParamStore& store_;
  std::mutex mutex_;
  std::vector<State> states_;
  std::vector<std::vector<storage::Lease>> held_;
};

}  // namespace ds::zero
