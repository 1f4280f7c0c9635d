#include "config/schema.h"

namespace ds::config {

DS_CONFIG_CHAPTER(70, kTraining, "Checkpoints") {
  c.add(section(
      "checkpoint", "How checkpoints are written and read.",
      {
          text("tag_validation", "WARN", "What to do when ranks save under different tags.")
              .one_of_any_case({"WARN", "IGNORE", "FAIL"}),
          boolean("load_universal", false, "load_checkpoint reads a universal checkpoint."),
          boolean("use_node_local_storage", false, "Every node writes to a disk of its own.")
              .not_built("checkpoints on node-local disks"),
          section(
              "parallel_write", "Which ranks write.",
              {
                  boolean("pipeline_stage", false, "All data-parallel ranks share the layers of their pipeline stage.")
                      .not_built("parallel checkpoint writing"),
              }),
          boolean("checkpoint_serialization", true, "Write with torch.save; false writes tensors bare.")
              .not_built("checkpoints without torch.save"),
          section("writer", "A faster writer of checkpoint files.",
                  {
                      text("type", "FAST", "Which writer.").one_of_any_case({"MOCK", "PYTHON", "FAST"}),
                      integer("io_buffer_size", 67108864, "Bytes of its buffer.").above(0),
                      boolean("io_buffer_double", true, "Fill one buffer while the other is written."),
                      boolean("show_statistics", false, "Print its bandwidth."),
                      text("data_parallel", nullptr, "Ranks that share the writing.")
                          .one_of_any_case({"REPLICA", "SOCKET", "MACHINE"}),
                      boolean("decoupled", false, "Write in a process of its own while training goes on."),
                      integer("io_multiplier", 1, "Write everything so many times (for measurements).").above(0),
                  })
              .absent_is_null()
              .not_built("the fast checkpoint writer", kWhenPresent),
      }));
  auto nebula = section("nebula", "Checkpoints by Azure Nebula.",
                        {
                            boolean("enabled", false, "Switch it on."),
                            text("persistent_storage_path", nullptr, "Folder for the copies that stay."),
                            integer("persistent_time_interval", 100, "Seconds between those.").above(0),
                            integer("num_of_version_in_retention", 2, "How many of them are kept.").above(0),
                            boolean("enable_nebula_load", true, "Load through Nebula, too."),
                            text("nebula_load_path", nullptr, "Folder to load from."),
                        });
  c.add(nebula.not_built("Nebula checkpoints"));
  auto datastates = section("datastates_ckpt", "Asynchronous checkpoints by DataStates. Its presence switches it on.",
                            {
                                integer("host_cache_size", nullptr, "GiB of host memory for snapshots.").above(0),
                            });
  c.add(
      datastates.keeps_unknown().absent_is_null().bool_is_presence().not_built("DataStates checkpoints", kWhenPresent));
}

}  // namespace ds::config
