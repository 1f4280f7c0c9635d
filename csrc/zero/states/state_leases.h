// Keeps masters and optimizer states as they are while somebody copies them in the background: by read leases.
#pragma once
#include <mutex>
#include <utility>
#include <vector>

#include "base/condition_variable.h"
#include "storage/shard_storage.h"
#include "zero/spaces/param_store.h"

namespace ds::zero {

class StateLeases {
 public:
  explicit StateLeases(const ParamStore& store) : store_(store) {}  // the store outlives it

  // Read leases of all masters and states that there are, until let_go(), which another thread may call. May be nested.
  // `more`: of these buffers, too.
  void hold(const std::vector<std::pair<const ParamSpace*, const Buffer*>>& more = {});
  void let_go();
  // Until nobody holds them. A caller that hands out memory of states waits first; a caller that acquires them
  // waits in any case.
  void wait();

 private:
  const ParamStore& store_;
  std::mutex mutex_;
  ConditionVariable changed_;
  std::vector<std::vector<storage::Lease>> held_;
};

}  // namespace ds::zero
