// Memory tiers of a step that is planned: nothing is stored, and bytes are counted.
#pragma once
#include "storage/tier.h"

namespace ds::storage {

// Returns `count` tiers, by Medium. Blocks and leases of the device and of the host are meta tensors. Those of the
// device count as its memory (MetaMemory), blocks by the name of their plane, leases as `scratch`; those of the host do
// not. Blocks of the other tiers are read and written without effect. Usage has the bytes that rest and travel, as in a
// run.
Tiers counted_tiers(size_t count, const std::string& scratch);

}  // namespace ds::storage
