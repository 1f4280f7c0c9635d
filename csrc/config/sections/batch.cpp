// Batch sizes and accumulation.
#include "config/schema.h"

namespace ds::config {

// The rules between the three are in plan/batch_plan.h, because they need the number of ranks.
DS_CONFIG_CHAPTER(10, kTraining, "Batch") {
  c.add(integer("train_batch_size", nullptr,
                "Samples per optimizer step over all ranks: micro batch x accumulation x data-parallel ranks.")
            .above(0)
            .raises(ErrorKind::kAssertion));
  c.add(integer("train_micro_batch_size_per_gpu", nullptr, "Samples per rank in one forward and backward.")
            .above(0)
            .raises(ErrorKind::kAssertion));
  c.add(integer("gradient_accumulation_steps", nullptr, "Forward and backward passes per optimizer step.")
            .above(0)
            .raises(ErrorKind::kAssertion));
  c.add(boolean("managed_gradient_accumulation", true,
                "false: the caller owns the boundary, and each step() is an optimizer update."));
}

}  // namespace ds::config
