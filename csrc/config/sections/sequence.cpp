// The section sequence_parallel.
#include "config/schema.h"

namespace ds::config {

DS_CONFIG_CHAPTER(36, kTraining, "Sequence parallelism") {
  // Ours, not DeepSpeed's.
  c.add(section("sequence_parallel", "Ranks that share one sequence, and settings that allow longer sequences.",
                {
                    integer("size", nullptr, "Ranks that share one sequence: another key for sequence_parallel_size.")
                        .above(0),
                    text("method", "auto",
                         "Method by which the ranks share the attention of a model of transformers. ulysses: tokens "
                         "are exchanged for heads; ring: keys and values travel; both: neighbours exchange, and their "
                         "groups are a ring; auto: an exchange inside of a host, a ring between hosts and where heads "
                         "are fewer than ranks.")
                        .one_of({"auto", "ulysses", "ring", "both"}),
                    boolean("tile_mlp", false,
                            "MLPs go through the sequence tile by tile: those that are called like one and are "
                            "proven to treat every token alone, or a list of names of modules.")
                        .also(kList)
                        .items(kText),
                    boolean("tile_loss", false,
                            "Head and cross entropy of a transformers model go through the sequence tile by tile."),
                    integer("chunk", 0,
                            "Tokens of the whole sequence whose attention is computed at a time, in models of "
                            "transformers; 0: all.")
                        .at_least(0),
                    text("offload", "none",
                         "Place where inputs of recomputed layers, and with chunk queries, keys and values, wait for "
                         "backward.")
                        .one_of({"none", "host", "file"}),
                    text("folder", nullptr, "Folder for offload \"file\", on a drive of this host."),
                })
            .absent_is_null());
  c.rule("sequence_parallel.size and sequence_parallel_size are one number.", [](RuleContext& j) {
    if (!j.given("sequence_parallel.size")) return;
    const int64_t size = j.integer("sequence_parallel.size");
    if (!j.given("sequence_parallel_size")) {
      j.derive("sequence_parallel_size", size, "sequence_parallel.size");
    } else if (j.integer("sequence_parallel_size") != size) {
      j.error({"sequence_parallel.size", "sequence_parallel_size"}, "they name one number of ranks.",
              "Make them equal, or leave one out.");
    }
  });
  c.rule("sequence_parallel.chunk excludes the methods ring and both.", [](RuleContext& j) {
    const std::string method = j.text("sequence_parallel.method");
    if (j.integer("sequence_parallel.chunk") > 0 && (method == "ring" || method == "both"))
      j.error({"sequence_parallel.chunk", "sequence_parallel.method"}, "keys that travel are computed as they come.",
              "Use auto or ulysses, or leave chunk out.");
  });
  c.rule("sequence_parallel.offload \"file\" needs sequence_parallel.folder.", [](RuleContext& j) {
    const bool file = j.text("sequence_parallel.offload") == "file";
    if (file && j.text("sequence_parallel.folder").empty())
      j.error({"sequence_parallel.offload"}, "files need a folder.", "Set sequence_parallel.folder to a folder.");
    if (!file && j.given("sequence_parallel.folder"))
      j.warn({"sequence_parallel.folder"}, "has no effect unless offload is \"file\".");
  });
}

}  // namespace ds::config
