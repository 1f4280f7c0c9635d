// The sections elasticity and autotuning.
#include "config/schema.h"

namespace ds::config {

DS_CONFIG_CHAPTER(75, kTraining, "Elastic training and tuning") {
  auto elastic = section(
      "elasticity", "Batch sizes that stay the same when the number of ranks changes.",
      {
          boolean("enabled", false, "Switch it on."),
          integer("max_train_batch_size", 2000, "Largest train batch size.").above(0),
          list("micro_batch_sizes", std::vector<int64_t>{2, 4, 6}, "Micro batch sizes to choose from.")
              .items(kInt)
              .items_at_least(1),
          integer("min_gpus", 1, "Fewest ranks.").at_least(1),
          integer("max_gpus", 10000, "Most ranks.").at_least(1),
          integer("min_time", 0, "Minutes between changes.").at_least(0),
          boolean("prefer_larger_batch", true, "Take the larger batch where several choices are equally good."),
          boolean("ignore_non_elastic_batch_info", false,
                  "Batch keys beside this section are ignored instead of refused."),
          number("version", 0.2, "Version of the rules.").one_of({0.1, 0.2}),
          integer("model_parallel_size", 1, "Ranks per copy of the model.").at_least(1),
          integer("num_gpus_per_node", 1, "Ranks per node.").at_least(1),
          text("save_on_signal", nullptr,
               "Folder for a checkpoint that is written after the step in which SIGTERM comes; then the ranks "
               "end with code 143. Works without enabled."),
          integer("memory_copies", 0,
                  "Other hosts that have each snapshot of the run, in the memory of their agents, beside the "
                  "host that took it; 0: no snapshots. For deepspeed --elastic_training; works without enabled.")
              .one_of({0, 1}),
          integer("snapshot_steps", 10, "Steps between two snapshots.").at_least(1),
      });
  c.add(elastic);
  auto tuning =
      section("autotuning", "Search for the fastest configuration.",
              {
                  boolean("enabled", false, "Switch it on."),
                  boolean("fast", true, "Tune only micro batch size and ZeRO stage."),
                  text("results_dir", "autotuning_results", "Folder for results."),
                  text("exps_dir", "autotuning_exps", "Folder for experiments."),
                  boolean("overwrite", true, "Run experiments again that have results."),
                  integer("start_profile_step", 3, "First measured step, counted from 0.").at_least(0),
                  integer("end_profile_step", 5, "The step, counted from 0, before which the run ends.").at_least(0),
                  text("metric", "throughput", "Metric to make best.")
                      .one_of({"latency", "throughput", "flops", "forward", "step"}),
                  text("metric_path", nullptr,
                       "File that gets the metrics; null: metrics.json. The tuner names one for each experiment."),
                  text("tuner_type", "gridsearch", "Search method.").one_of({"gridsearch", "random", "model_based"}),
                  integer("tuner_early_stopping", 5, "Experiments without progress before it stops.").at_least(0),
                  integer("tuner_num_trials", 50, "Most experiments.").above(0),
                  table("arg_mappings", nullptr, "Script arguments that carry a key of this configuration, by key."),
                  section("model_info", "Known facts about the model.",
                          {
                              boolean("profile", false, "Find it out in a run of its own."),
                              integer("num_params", nullptr, "Parameters.").above(0),
                              integer("hidden_size", nullptr, "Width.")
                                  .above(0)
                                  .no_effect("the tuner runs the model of the script"),
                              integer("num_layers", nullptr, "Layers.")
                                  .above(0)
                                  .no_effect("the tuner runs the model of the script"),
                          })
                      .absent_is_null(),
                  text("model_info_path", nullptr, "File that gets it; null: model_info.json."),
                  number("experiment_timeout", 1800.0, "Seconds after which the tuner ends an experiment.").above(0),
                  integer("mp_size", 1, "Ranks per copy of the model.").at_least(1),
                  integer("max_train_batch_size", nullptr, "Largest train batch size to try.").above(0),
                  integer("min_train_batch_size", 1, "Smallest train batch size to try.").above(0),
                  integer("max_train_micro_batch_size_per_gpu", 1024, "Largest micro batch size to try.").above(0),
                  integer("min_train_micro_batch_size_per_gpu", 1, "Smallest micro batch size to try.").above(0),
                  integer("num_tuning_micro_batch_sizes", 3, "Number of micro batch sizes to try.").above(0),
              });
  c.add(tuning);
  c.rule(
      "elasticity.max_gpus is at least elasticity.min_gpus; max_train_batch_size and micro_batch_sizes are required "
      "when it is enabled.",
      [](RuleContext& j) {
        if (j.integer("elasticity.max_gpus") < j.integer("elasticity.min_gpus")) {
          j.error({"elasticity.max_gpus", "elasticity.min_gpus"}, "the most ranks are fewer than the fewest.",
                  "Raise \"max_gpus\" or lower \"min_gpus\".");
        }
        if (!j.on("elasticity.enabled")) return;
        for (const char* key : {"elasticity.max_train_batch_size", "elasticity.micro_batch_sizes"}) {
          if (!j.given(key) && !j.refused(key))
            j.error({key, "elasticity.enabled"}, "the first is required when the second is true.", "Add it.");
        }
        if (j.given("elasticity.micro_batch_sizes") && j.size("elasticity.micro_batch_sizes") == 0) {
          j.error({"elasticity.micro_batch_sizes"}, "must not be empty.", "Name at least one size, such as [2, 4].");
        }
      });
  c.rule("elasticity.save_on_signal is not empty.", [](RuleContext& j) {
    if (!j.given("elasticity.save_on_signal") || !j.text("elasticity.save_on_signal").empty()) return;
    j.error({"elasticity.save_on_signal"}, "must not be empty.", "Name a folder, or leave the key out.");
  });
  c.rule("elasticity.snapshot_steps needs elasticity.memory_copies.", [](RuleContext& j) {
    if (!j.given("elasticity.snapshot_steps") || j.integer("elasticity.memory_copies") > 0) return;
    j.error({"elasticity.snapshot_steps", "elasticity.memory_copies"}, "no snapshots are taken while the second is 0.",
            "Set \"memory_copies\" to 1, or leave \"snapshot_steps\" out.");
  });
  c.rule("elasticity.model_parallel_size above 1 needs elasticity.version 0.2.", [](RuleContext& j) {
    if (!j.on("elasticity.enabled") || j.integer("elasticity.model_parallel_size") < 2) return;
    if (j.number("elasticity.version") < 0.2) {
      j.error({"elasticity.model_parallel_size", "elasticity.version"}, "version 0.1 knows no model parallelism.",
              "Set \"version\" to 0.2.");
    }
  });
  c.rule(
      "Batch keys and elasticity exclude each other unless elasticity.ignore_non_elastic_batch_info is true.",
      [](RuleContext& j) {
        if (!j.on("elasticity.enabled") || j.on("elasticity.ignore_non_elastic_batch_info")) return;
        for (const char* key : {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}) {
          if (j.given(key))
            j.error({key, "elasticity.enabled"}, "elastic training chooses the batch sizes.",
                    std::string("Leave \"") + key + "\" out.");
        }
      });
  c.rule("autotuning.end_profile_step is above autotuning.start_profile_step.", [](RuleContext& j) {
    if (!j.on("autotuning.enabled")) return;
    if (j.integer("autotuning.end_profile_step") > j.integer("autotuning.start_profile_step")) return;
    j.error({"autotuning.end_profile_step", "autotuning.start_profile_step"}, "no step would be measured.",
            "Raise the first: it is the step before which the run ends.");
  });
  c.rule("autotuning.results_dir and exps_dir are not empty.", [](RuleContext& j) {
    for (const char* key : {"autotuning.results_dir", "autotuning.exps_dir"}) {
      if (j.text(key).empty()) j.error({key}, "must not be empty.", "Leave the key out to get the default.");
    }
  });
}

}  // namespace ds::config
