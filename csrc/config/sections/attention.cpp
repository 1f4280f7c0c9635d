// The section sparse_attention.
#include <map>
#include <set>

#include "config/schema.h"

namespace ds::config {

namespace {

const std::map<std::string, std::set<std::string>>& keys_by_mode() {
  static const std::map<std::string, std::set<std::string>> keys = {
      {"dense", {}},
      {"fixed",
       {"different_layout_per_head", "num_local_blocks", "num_global_blocks", "attention",
        "horizontal_global_attention", "num_different_global_patterns"}},
      {"variable",
       {"different_layout_per_head", "attention", "horizontal_global_attention", "num_random_blocks",
        "local_window_blocks", "global_block_indices", "global_block_end_indices"}},
      {"bigbird", {"different_layout_per_head", "num_global_blocks", "num_random_blocks", "num_sliding_window_blocks"}},
      {"bslongformer",
       {"different_layout_per_head", "global_block_indices", "global_block_end_indices", "num_sliding_window_blocks"}},
  };
  return keys;
}

}  // namespace

DS_CONFIG_CHAPTER(90, kTraining, "Sparse attention") {
  c.add(
      section(
          "sparse_attention", "Block-sparse self-attention of a model of transformers. Its presence switches it on.",
          {
              text("mode", "fixed", "Pattern of the blocks.")
                  .one_of({"dense", "fixed", "variable", "bigbird", "bslongformer"})
                  .raises(ErrorKind::kNotImplemented),
              integer("block", 16, "Side of a block.").above(0),
              boolean("different_layout_per_head", false, "Every head has a pattern of its own."),
              integer("num_local_blocks", 4, "Blocks of a local window (fixed).").above(0),
              integer("num_global_blocks", 1, "Blocks of a window that all attend to (fixed, bigbird).").above(0),
              text("attention", "bidirectional", "Direction of the attention (fixed, variable).")
                  .one_of({"bidirectional", "unidirectional"}),
              boolean("horizontal_global_attention", false, "Global blocks attend to all, too (fixed, variable)."),
              integer("num_different_global_patterns", 1, "Different choices of global blocks over heads (fixed).")
                  .above(0),
              integer("num_random_blocks", 0, "Random blocks per row (variable, bigbird).").at_least(0),
              list("local_window_blocks", std::vector<int64_t>{4}, "Blocks of each local window (variable).")
                  .items(kInt)
                  .items_at_least(1),
              list("global_block_indices", std::vector<int64_t>{0},
                   "Indices of the global blocks (variable, bslongformer).")
                  .items(kInt)
                  .items_at_least(0),
              list("global_block_end_indices", nullptr, "Ends of ranges that start at those (variable, bslongformer).")
                  .items(kInt)
                  .items_at_least(0),
              integer("num_sliding_window_blocks", 3, "Blocks of the sliding window (bigbird, bslongformer).").above(0),
          })
          .absent_is_null());
  c.rule("sparse_attention: a key belongs to the mode.", [](RuleContext& j) {
    const std::string mode = j.text("sparse_attention.mode");
    const auto known = keys_by_mode().find(mode);
    if (known == keys_by_mode().end()) return;
    for (const std::string& key : j.given_keys("sparse_attention")) {
      if (key == "mode" || key == "block" || known->second.count(key)) continue;
      std::string modes;
      for (const auto& [other, keys] : keys_by_mode()) {
        if (keys.count(key)) modes += (modes.empty() ? "" : ", ") + other;
      }
      j.error({"sparse_attention." + key, "sparse_attention.mode"}, "the mode \"" + mode + "\" has no such key.",
              "It belongs to " + modes + ".");
    }
  });
}

}  // namespace ds::config
