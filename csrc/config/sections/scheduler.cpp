// The section scheduler.
#include "config/schema.h"

namespace ds::config {

namespace {

using Fields = std::vector<Field>;

// One value, or one per parameter group.
Field per_group(std::string name, Literal fallback, std::string doc) {
  return number(std::move(name), std::move(fallback), std::move(doc)).also(kList).items(kFloat);
}
Field last_batch() { return integer("last_batch_iteration", -1, "Step to resume after; -1 starts anew.").at_least(-1); }
Field unit() {
  return text("unit", "steps", "Unit that the schedule counts, in every key that says steps.")
      .one_of({"steps", "samples", "tokens"});
}
Field warmup_unit() {
  return text("warmup_unit", nullptr, "Unit that the warm-up counts; null: the unit of the schedule.")
      .one_of({"steps", "samples", "tokens"});
}
Field warmup_type() {
  return text("warmup_type", "log", "Shape of the warm-up.").one_of({"log", "linear"}).reads_other_text_as("log");
}
Field warmup_steps() { return integer("warmup_num_steps", 1000, "Steps of warm-up.").at_least(0); }
Field total_steps() {
  return integer("total_num_steps", nullptr, "Steps of the whole training.").at_least(0).required();
}

std::map<std::string, Fields> scheduler_params() {
  return {
      {"LRRangeTest",
       {per_group("lr_range_test_min_lr", 0.001, "Learning rate to start from."),
        integer("lr_range_test_step_size", 2000, "Steps per increase.").above(0),
        number("lr_range_test_step_rate", 1.0, "Increase per step size, relative to the start."),
        boolean("lr_range_test_staircase", false, "Increase at once per step size, not gradually."), last_batch(),
        unit()}},
      {"OneCycle",
       {per_group("cycle_min_lr", nullptr, "Learning rate at the ends of the cycle.").required(),
        per_group("cycle_max_lr", nullptr, "Learning rate in its middle.").required(),
        number("decay_lr_rate", 0.0, "Decay of the rate after the cycle."),
        integer("cycle_first_step_size", 2000, "Steps of the rising half.").above(0),
        integer("cycle_second_step_size", nullptr, "Steps of the falling half; null: as many, 0: none.").at_least(0),
        integer("cycle_first_stair_count", 0, "Stairs in the rising half; 0 rises gradually.").at_least(0),
        integer("cycle_second_stair_count", nullptr, "Stairs in the falling half; null: as many.").at_least(0),
        integer("decay_step_size", 0, "Steps per decay after the cycle; 0 does not decay.").at_least(0),
        boolean("cycle_momentum", true, "Cycle the momentum against the rate."),
        per_group("cycle_min_mom", 0.8, "Momentum in the middle of the cycle."),
        per_group("cycle_max_mom", 0.9, "Momentum at its ends."),
        number("decay_mom_rate", 0.0, "Growth of the momentum after the cycle."), last_batch(), unit()}},
      {"WarmupLR",
       {per_group("warmup_min_lr", 0.0, "Learning rate to start from."),
        per_group("warmup_max_lr", nullptr, "Learning rate to reach; null: the optimizer's."), warmup_steps(),
        warmup_type(), last_batch(), unit(), warmup_unit()}},
      {"WarmupDecayLR",
       {total_steps(), per_group("warmup_min_lr", 0.0, "Learning rate to start from."),
        per_group("warmup_max_lr", 0.001, "Learning rate to reach before the decay to zero."), warmup_steps(),
        warmup_type(), last_batch(), unit(), warmup_unit()}},
      {"WarmupCosineLR",
       {total_steps(), number("warmup_min_ratio", 0.0, "Share of the optimizer's rate to start from.").at_least(0),
        warmup_steps(), number("cos_min_ratio", 0.0001, "Share of the optimizer's rate to end with.").at_least(0),
        warmup_type(), last_batch(), unit(), warmup_unit()}},
  };
}

}  // namespace

DS_CONFIG_CHAPTER(25, kTraining, "Learning rate") {
  c.add(
      section(
          "scheduler",
          "The learning-rate schedule to make, unless one is given to initialize(). It moves once per optimizer step.",
          {
              text("type", nullptr, "Its name.")
                  .one_of({"LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"})
                  .or_other("any class in torch.optim.lr_scheduler"),
              table("params", nullptr, "Arguments of its constructor.").variants_by("type", scheduler_params()),
          })
          .ignores_private());
}

}  // namespace ds::config
