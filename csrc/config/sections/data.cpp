// Keys of data: curricula, data efficiency, dropped layers.
#include "config/schema.h"

namespace ds::config {

namespace {

Field path(const char* name, const char* doc) { return text(name, nullptr, doc); }
Field count(const char* name, const char* doc) { return integer(name, nullptr, doc).at_least(0); }

Field curriculum_schedule() {
  return section(
      "schedule_config", "Settings of the schedule.",
      {
          count("total_curriculum_step", "Steps until the difficulty reaches its maximum."),
          count("difficulty_step", "Difficulties are multiples of this."),
          count("root_degree", "fixed_root: the degree of the root."),
          list("difficulty", nullptr, "fixed_discrete: the difficulties.").items(kInt),
          list("max_step", nullptr, "fixed_discrete: the last step of each but the last difficulty.").items(kInt),
      });
}

Field schedule_type() {
  return text("schedule_type", nullptr, "Function by which the difficulty grows.")
      .one_of({"fixed_linear", "fixed_root", "fixed_discrete", "custom"});
}

Field data_sampling() {
  return section(
      "data_sampling", "The choice of samples.",
      {
          enabled(),
          integer("num_epochs", 1000, "The data set is drawn at most this many times.").above(0),
          integer("num_workers", 0, "Worker processes of the loader.").at_least(0),
          boolean("pin_memory", false, "Page-locked host memory for batches."),
          section(
              "curriculum_learning", "Easy samples first.",
              {
                  enabled(),
                  path("data_cluster_path",
                       "Folder for the clusters of samples. One rank writes it, and all ranks read it."),
                  section(
                      "curriculum_metrics", "Metrics of difficulty, by name.",
                      {
                          section(
                              "<metric name>", "One metric.",
                              {
                                  path("index_to_sample_path",
                                       "Indexed data set of an analysis: the samples of each value of the metric."),
                                  path("index_to_metric_path",
                                       "Indexed data set of an analysis: the values of the metric."),
                                  text("difficulty_type", nullptr, "Whether a difficulty is a value or a percentile.")
                                      .one_of({"value", "percentile"}),
                                  text("clustering_type", nullptr,
                                       "schedule_based: the metric chooses samples; single_cluster: it does not.")
                                      .one_of({"single_cluster", "schedule_based"}),
                                  count("min_difficulty", "Difficulty at the start."),
                                  count("max_difficulty", "Difficulty at the end."),
                                  schedule_type(),
                                  curriculum_schedule(),
                              }),
                      }),
              }),
          section(
              "dynamic_batching", "Batches of equal token counts.",
              {
                  enabled(),
                  path("metrics_path",
                       "Folder of an analysis with the metric seqlen, or of seqlens.npy, the lengths of the samples; "
                       "the latter is written where both are missing."),
                  text("lr_scaling_method", "linear", "Rule by which the learning rate follows the batch size.")
                      .one_of({"linear", "sqrt", "none"}),
                  integer("min_batch_size", 1, "Minimum number of samples in a micro-batch; smaller ones are left out.")
                      .above(0),
                  integer("max_batch_size", nullptr, "Maximum number of samples in a micro-batch.").above(0),
                  text("sequence_picking_order", "dataloader", "Order in which samples are put together.")
                      .one_of({"random", "seqlen", "dataloader"}),
                  integer("max_tokens", nullptr, "Maximum number of tokens in a micro-batch.").above(0),
                  boolean("verbose", false, "Log the batches."),
              }),
      });
}

Field data_routing() {
  return section(
      "data_routing", "Layers that drop tokens.",
      {
          enabled(),
          section(
              "random_ltd",
              "Random-LTD: some layers compute on random tokens of each sample, and the other tokens skip them.",
              {
                  enabled(),
                  integer("total_layer_num", nullptr, "Layers of the model.").above(0),
                  count("random_ltd_layer_num", "Layers that drop tokens; null: as many as random_ltd_layer_id names."),
                  list("random_ltd_layer_id", nullptr, "Their numbers in the model, from 0.")
                      .items(kInt)
                      .items_at_least(0),
                  text("model_mask_name", nullptr,
                       "Keyword of the attention mask in the forward of a layer; null: there is none."),
                  text("model_type", nullptr, "Kind of the layers.")
                      .one_of({"decoder", "encoder"})
                      .no_effect("masks of both are cut to the kept tokens in the same way"),
                  text("hidden_state_order", nullptr, "Order of dimensions of the hidden states.")
                      .one_of({"batch_seq_dim", "seq_batch_dim"}),
                  count("micro_batch_size", "Must be equal to train_micro_batch_size_per_gpu; null: not compared."),
                  count("global_batch_size", "Must be equal to train_batch_size; null: not compared."),
                  section(
                      "random_ltd_schedule", "Number of tokens that are kept of a sample, over the steps.",
                      {
                          integer("min_value", nullptr, "The number at the start.").above(0),
                          integer("max_value", nullptr, "The number at the end: the length of a sequence.").above(0),
                          text("schedule_type", nullptr, "Function by which the number grows; null: fixed_linear.")
                              .one_of({"fixed_linear"}),
                          section("schedule_config", "Settings of the schedule.",
                                  {
                                      integer("require_steps", nullptr, "Steps until the end.").above(0),
                                      integer("seq_per_step", nullptr, "Tokens added at one time.").above(0),
                                  }),
                      }),
                  section("layer_token_lr_schedule", "Let the learning rate follow the tokens that layers have seen.",
                          {
                              enabled(),
                              integer("total_layer_tokens", nullptr, "Tokens over all layers.").above(0),
                              text("warmup_type", nullptr, "Shape of the warm-up; null: the schedule's.")
                                  .one_of({"log", "linear"}),
                              count("warmup_layer_tokens", "Tokens of warm-up; null: none."),
                          }),
              }),
      });
}

const std::string kLtd = "data_efficiency.data_routing.random_ltd";

void check_random_ltd(RuleContext& j) {
  if (!j.on(kLtd + ".enabled")) return;
  for (const char* around : {"data_efficiency.enabled", "data_efficiency.data_routing.enabled"})
    if (!j.on(around))
      return j.warn({kLtd + ".enabled", around}, "no token is dropped while the section around it is off.");
  const std::string schedule = kLtd + ".random_ltd_schedule", settings = schedule + ".schedule_config";
  for (const std::string& key :
       {kLtd + ".total_layer_num", kLtd + ".random_ltd_layer_id", kLtd + ".hidden_state_order", schedule + ".min_value",
        schedule + ".max_value", settings + ".require_steps", settings + ".seq_per_step"})
    if (j.is_null(key) && !j.refused(key)) j.error({key}, "required when random_ltd is enabled.", "Add it.");
  const std::string number = kLtd + ".random_ltd_layer_num", ids = kLtd + ".random_ltd_layer_id";
  if (!j.is_null(number) && !j.is_null(ids) && j.integer(number) != static_cast<int64_t>(j.size(ids)))
    j.error({number, ids}, "random_ltd_layer_id names another number of layers.", "Leave random_ltd_layer_num out.");
  const int64_t least = j.integer(schedule + ".min_value"), most = j.integer(schedule + ".max_value");
  if (most > 0 && least > most)
    j.error({schedule + ".min_value", schedule + ".max_value"}, "the first number of tokens is above the last one.",
            "Make max_value the length of a sequence, and min_value less.");
  if (least > 0 && j.integer(settings + ".seq_per_step") > least)
    j.error({settings + ".seq_per_step", schedule + ".min_value"},
            "numbers of tokens are multiples of seq_per_step, and the first one would be 0.",
            "Make seq_per_step at most min_value.");
  const std::string rates = kLtd + ".layer_token_lr_schedule";
  if (!j.on(rates + ".enabled")) return;
  if (j.is_null(rates + ".total_layer_tokens"))
    j.error({rates + ".total_layer_tokens"}, "required when layer_token_lr_schedule is enabled.", "Add it.");
  const std::string type = j.text("scheduler.type");
  if (type != "WarmupDecayLR" && type != "WarmupCosineLR")
    j.error({"scheduler.type", rates + ".enabled"}, "layer_token_lr_schedule needs a schedule with an end.",
            "Use WarmupDecayLR or WarmupCosineLR.");
}

void check_discrete(RuleContext& j, const std::string& at) {
  if (j.text(at + ".schedule_type") != "fixed_discrete") return;
  const std::string levels = at + ".schedule_config.difficulty", steps = at + ".schedule_config.max_step";
  if (j.size(levels) != j.size(steps) + 1) {
    j.error({steps, levels}, "max_step has one item fewer than difficulty: the last difficulty has no end.",
            "Add or remove items.");
  }
}

}  // namespace

DS_CONFIG_CHAPTER(85, kTraining, "Data and curriculum") {
  auto data = section("data_efficiency", "Curriculum over samples, dynamic batches, token dropping.",
                      {
                          enabled(),
                          integer("seed", 1234, "Seed of the sampling."),
                          data_sampling(),
                          data_routing(),
                      });
  c.add(data.ignores_private());
  auto curriculum = section("curriculum_learning", "Older curriculum over sequence length.",
                            {
                                enabled(),
                                text("curriculum_type", nullptr, "The kind of difficulty.").one_of({"seqlen"}),
                                count("min_difficulty", "Difficulty at the start."),
                                count("max_difficulty", "Difficulty at the end."),
                                schedule_type(),
                                curriculum_schedule(),
                                table("truncate", nullptr,
                                      "Let the loader cut batches: the name or the position of a tensor, and its "
                                      "dimension (or a list of them) that counts tokens."),
                            });
  c.add(curriculum);
  c.add(integer("max_train_tokens", nullptr,
                "engine.training_ended() returns true once all ranks together have trained on this many tokens.")
            .above(0));
  auto drop =
      section("progressive_layer_drop", "Steps leave out random layers, and more of them as the training goes on.",
              {
                  enabled(),
                  number("theta", 1.0, "Limit of the probability of keeping a layer; at step 0 it is 1.")
                      .at_least(0)
                      .at_most(1),
                  number("gamma", 0.001, "Rate of the probability: it is (1 - theta) * exp(-gamma * step) + theta.")
                      .at_least(0),
              });
  c.add(drop);

  c.rule(
      "data_efficiency: curriculum_metrics and dynamic_batching.max_tokens are required when their section is enabled.",
      [](RuleContext& j) {
        const std::string at = "data_efficiency.data_sampling.";
        if (j.on(at + "curriculum_learning.enabled") && j.size(at + "curriculum_learning.curriculum_metrics") == 0) {
          j.error({at + "curriculum_learning.curriculum_metrics"}, "required when curriculum learning is enabled.",
                  "Add at least one metric.");
        }
        if (j.on(at + "dynamic_batching.enabled") && j.is_null(at + "dynamic_batching.max_tokens")) {
          j.error({at + "dynamic_batching.max_tokens"}, "required when dynamic batching is enabled.", "Add it.");
        }
      });
  c.whole_rule(
      "random_ltd: its layers, the order of hidden states and the schedule are required when it is enabled; "
      "layer_token_lr_schedule needs a scheduler with an end.",
      check_random_ltd);
  c.rule("fixed_discrete schedules: max_step is one shorter than difficulty.", [](RuleContext& j) {
    check_discrete(j, "curriculum_learning");
    const std::string metrics = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics";
    for (const std::string& name : j.keys(metrics)) {
      if (name.find('.') == std::string::npos) check_discrete(j, metrics + "." + name);
    }
  });
}

}  // namespace ds::config
