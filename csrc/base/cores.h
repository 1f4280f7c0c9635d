// Cores that this process may run on.
#pragma once
#include <sched.h>

namespace ds {

// By the process's affinity; 1 where that cannot be asked.
inline int usable_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace ds
