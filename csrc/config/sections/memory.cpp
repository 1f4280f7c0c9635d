// The section aio, and other keys of memory.
#include "config/schema.h"

namespace ds::config {

DS_CONFIG_CHAPTER(55, kTraining, "Memory and storage") {
  auto aio = section("aio", "Reading and writing tensors on NVMe.",
                     {
                         integer("block_size", 1048576, "Bytes per request.").above(0),
                         integer("queue_depth", 8, "Requests in flight per thread.").above(0),
                         integer("intra_op_parallelism", 1, "Threads per tensor.").above(0),
                         boolean("single_submit", false, "Submit requests one by one."),
                         boolean("overlap_events", true, "Submit new requests while earlier ones complete."),
                         boolean("use_gds", false, "Move data between GPU and NVMe directly; needs cuFile and a GPU."),
                     });
  c.add(aio.ignores_unknown());
  auto recompute = section(
      "activation_checkpointing", "Settings of deepspeed.checkpointing, which recomputes activations in backward.",
      {
          boolean("partition_activations", false, "Shard saved activations over model-parallel ranks."),
          boolean("cpu_checkpointing", false, "Keep saved activations in host memory."),
          boolean("contiguous_memory_optimization", false, "Copy saved activations into one buffer."),
          integer("number_checkpoints", nullptr, "Saved activations in that buffer.").above(0),
          boolean("synchronize_checkpoint_boundary", false, "Wait for the device at each boundary."),
          boolean("profile", false, "Time each checkpointed segment."),
      });
  c.add(recompute.ignores_private());
}

}  // namespace ds::config
