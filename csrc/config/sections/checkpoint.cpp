// The sections checkpoint, nebula and datastates_ckpt.
#include "config/schema.h"

namespace ds::config {

DS_CONFIG_CHAPTER(70, kTraining, "Checkpoints") {
  c.add(
      section(
          "checkpoint", "Writing and reading of checkpoints.",
          {
              text("tag_validation", "WARN", "Action when ranks save under different tags.")
                  .one_of_any_case({"WARN", "IGNORE", "FAIL"}),
              boolean("load_universal", false, "load_checkpoint reads a universal checkpoint."),
              boolean("use_node_local_storage", false,
                      "Every node writes to a disk of its own: its ranks' files, a manifest and `latest` for itself."),
              boolean("write_in_place", false,
                      "Write into the tag's folder itself, manifest and `latest` last, where folders cannot be renamed "
                      "(mounted object stores); there a tag that is saved again is not whole until then. true: always; "
                      "false: never.")
                  .or_null()
                  .fallback_to(nullptr)
                  .computed("null: true where the directory saved into cannot rename folders"),
              integer("keep_last", nullptr,
                      "Number of checkpoints that stay in a folder: a save removes the oldest that this library wrote "
                      "there.")
                  .above(0),
              text("verify_on_load", "sizes",
                   "load_checkpoint first compares this with the manifest: nothing, the presence and the sizes of all "
                   "files, or every byte.")
                  .one_of_any_case({"none", "sizes", "all"}),
              boolean("trust_pickles", false,
                      "Loading may call what a pickled file names, whatever it is. Only for files that you trust."),
              section("parallel_write", "Ranks that write.",
                      {
                          boolean("pipeline_stage", false,
                                  "All data-parallel ranks share the layers of their pipeline stage.")
                              .not_built("parallel checkpoint writing"),
                      }),
              text(
                  "engine", nullptr,
                  "Name of a registered checkpoint engine (entry points deepspeed.checkpoint_engines); null: the other "
                  "keys "
                  "decide."),
              boolean(
                  "async", false,
                  "Take a snapshot in host memory and write it while training goes on. A failure is raised by the next "
                  "step; the end of the program waits for the last save."),
              number(
                  "host_cache_size", nullptr,
                  "GiB of host memory that snapshots may take on each rank; null: as much as they need. A save waits "
                  "while it is full.")
                  .above(0),
              boolean("checkpoint_serialization", true,
                      "Write the zip archives of torch.save; false: the stream of tensors without an archive that "
                      "torch.save "
                      "wrote before. torch.load reads both."),
              section(
                  "writer", "A faster writer of checkpoint files.",
                  {
                      text("type", "FAST",
                           "FAST: threads and O_DIRECT in C++. PYTHON: torch.save. MOCK: writes nothing, to measure "
                           "everything else.")
                          .one_of_any_case({"MOCK", "PYTHON", "FAST"}),
                      text("format", "torch",
                           "torch: the files that other tools know. safetensors: safetensors and JSON, no pickle.")
                          .one_of_any_case({"torch", "safetensors"}),
                      integer("io_buffer_size", 67108864, "Bytes of its buffer.").above(0),
                      boolean("io_buffer_double", true, "Fill one buffer while the other is written."),
                      boolean("show_statistics", false, "Print its bandwidth."),
                      text("data_parallel", nullptr,
                           "Data-parallel ranks that share the writing of files that are equal on all of them (weights "
                           "below stage 3): all (REPLICA), one of each SOCKET or one of each MACHINE; null: the first "
                           "one writes alone.")
                          .one_of_any_case({"REPLICA", "SOCKET", "MACHINE"}),
                      boolean("decoupled", false, "Write in the background while training goes on, as `async` does."),
                      integer("io_multiplier", 1, "Write everything this many times (for measurements).").above(0),
                  })
                  .absent_is_null(),
          })
          .ignores_private());
  auto nebula = section("nebula", "Checkpoints by Azure Nebula.",
                        {
                            boolean("enabled", false, "Switch it on."),
                            text("persistent_storage_path", nullptr, "Folder for the copies that stay."),
                            integer("persistent_time_interval", 100, "Seconds between those.").above(0),
                            integer("num_of_version_in_retention", 2, "Number of these copies that are kept.").above(0),
                            boolean("enable_nebula_load", true, "Load through Nebula, too."),
                            text("nebula_load_path", nullptr, "Folder to load from."),
                        });
  c.add(nebula.not_built("Nebula checkpoints"));
  auto datastates = section("datastates_ckpt", "Asynchronous checkpoints by DataStates. Its presence switches it on.",
                            {
                                integer("host_cache_size", nullptr, "GiB of host memory for snapshots.").above(0),
                            });
  c.add(datastates
            .keeps_unknown("snapshots are written by the engine of checkpoint.async, which reads host_cache_size alone")
            .absent_is_null()
            .bool_is_presence());
  c.rule("checkpoint.writer.type PYTHON and MOCK exclude writing in the background and the format safetensors.",
         [](RuleContext& j) {
           if (j.is_null("checkpoint.writer") || j.text("checkpoint.writer.type") == "FAST") return;
           const std::string type = j.text("checkpoint.writer.type");
           const std::string text = "\"" + type + "\" writes in the calling thread only.";
           if (!j.is_null("checkpoint.writer.data_parallel"))
             j.error({"checkpoint.writer.type", "checkpoint.writer.data_parallel"},
                     "\"" + type + "\" writes every file with one rank.", "Use \"FAST\", or take the other key out.");
           for (const char* key : {"checkpoint.async", "checkpoint.writer.decoupled"}) {
             if (j.on(key)) j.error({"checkpoint.writer.type", key}, text, "Use \"FAST\", or take the other key out.");
           }
           if (!j.is_null("datastates_ckpt"))
             j.error({"checkpoint.writer.type", "datastates_ckpt"}, text, "Use \"FAST\", or take the section out.");
           if (type == "PYTHON" && j.text("checkpoint.writer.format") == "safetensors")
             j.error({"checkpoint.writer.type", "checkpoint.writer.format"}, "torch.save writes no safetensors.",
                     "Use the type \"FAST\".");
         });
  c.rule("checkpoint.writer.data_parallel needs files that are equal on several ranks, and zip archives.",
         [](RuleContext& j) {
           if (j.is_null("checkpoint.writer") || j.is_null("checkpoint.writer.data_parallel")) return;
           if (!j.on("checkpoint.checkpoint_serialization"))
             j.error({"checkpoint.writer.data_parallel", "checkpoint.checkpoint_serialization"},
                     "only zip archives are written by several ranks.", "Leave checkpoint_serialization true.");
           if (j.integer("zero_optimization.stage") == 3 || j.text("checkpoint.writer.format") == "safetensors")
             j.warn({"checkpoint.writer.data_parallel"},
                    "has no effect at stage 3 and with the format safetensors: every rank writes its own part there.");
         });
  c.rule("checkpoint_serialization is about files of torch.save.", [](RuleContext& j) {
    if (j.on("checkpoint.checkpoint_serialization") || j.is_null("checkpoint.writer") ||
        j.text("checkpoint.writer.format") != "safetensors")
      return;
    j.warn({"checkpoint.checkpoint_serialization", "checkpoint.writer.format"},
           "has no effect with the format safetensors.");
  });
}

}  // namespace ds::config
