// Keys of training that belong to no section.
#include "config/schema.h"

namespace ds::config {

DS_CONFIG_CHAPTER(30, kTraining, "Training step and messages") {
  c.add(number("gradient_clipping", 1.0, "Largest global gradient norm; 0 does not clip.").at_least(0));
  c.add(integer("steps_per_print", nullptr, "Optimizer steps between progress lines; null or infinity prints none.")
            .also(kInfinity)
            .above(0));
  c.add(boolean("wall_clock_breakdown", false,
                "Time forward, backward and step; flops_profiler.enabled switches it on."));
  c.add(boolean("memory_breakdown", false, "Print memory in use before and after forward, backward and step."));
  c.add(boolean("dump_state", false, "Print the engine's state when it is made."));
  c.add(text("log_level", nullptr, "Level of the DeepSpeed logger.")
            .one_of_any_case({"DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"}));
  c.add(boolean("disable_python_gc", false,
                "Python collects cyclic garbage only where the script calls engine.collect_python_gc()."));
  c.add(boolean("dataloader_drop_last", false, "Drop the last incomplete batch of an epoch."));
  c.add(boolean("graph_harvesting", false, "Capture the work on gradients in a CUDA graph.")
            .no_effect("a step has a few launches for each bucket, and none for each parameter"));
  c.add(integer("vocabulary_size", nullptr, "Rows of the model's embedding of words.")
            .above(0)
            .no_effect("it is only checked: a multiple of 8 is faster on tensor cores"));
  c.rule("flops_profiler.enabled switches wall_clock_breakdown on.", [](RuleContext& j) {
    if (j.on("flops_profiler.enabled") && !j.on("wall_clock_breakdown")) {
      j.derive("wall_clock_breakdown", true, "flops_profiler.enabled");
    }
  });
  c.rule("vocabulary_size should be a multiple of 8.", [](RuleContext& j) {
    if (j.integer("vocabulary_size") % 8 != 0) j.warn({"vocabulary_size"}, "a multiple of 8 uses tensor cores better.");
  });
  c.private_key("msamp");  // accelerate writes its own MS-AMP settings here
  // Words of scripts that keep their own settings in this file, one letter away from a key of ours.
  for (const char* word : {"map", "mode", "monitor", "timer"}) c.own_word(word);
}

}  // namespace ds::config
