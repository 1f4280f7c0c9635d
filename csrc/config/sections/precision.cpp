// The sections fp16, bf16, amp and torch_autocast.
#include "config/schema.h"

namespace ds::config {

namespace {

bool stage_1_to_3(const RuleContext& j) {
  const int64_t stage = j.integer("zero_optimization.stage");
  return stage >= 1 && stage <= 3;
}

Field dtype(std::string name, std::string doc) {
  return text(std::move(name), nullptr, std::move(doc))
      .one_of_any_case({"fp32", "fp16", "bf16"})
      .raises(ErrorKind::kValue);
}

}  // namespace

DS_CONFIG_CHAPTER(40, kTraining, "Precision") {
  c.add(validated("fp16", "Train in half precision with loss scaling.",
                  {
                      boolean("enabled", false, "Switch it on."),
                      boolean("auto_cast", false, "Cast floating-point inputs of forward to fp16."),
                      number("loss_scale", 0, "Static loss scale; 0 scales dynamically.").at_least(0),
                      integer("initial_scale_power", 16, "The dynamic scale starts at 2 to this power.").at_least(0),
                      integer("loss_scale_window", 1000, "Steps without overflow before the scale doubles."),
                      integer("hysteresis", 2, "Overflows before the scale halves.").at_least(1),
                      boolean("consecutive_hysteresis", false, "Only overflows in a row use the hysteresis up."),
                      integer("min_loss_scale", 1, "The dynamic scale never falls below.").also(kFloat),
                      boolean("fp16_master_weights_and_grads", false, "Keep master weights and gradients in fp16 too.")
                          .not_built("fp16 master weights"),
                  })
            .ignores_old("fp16", "fp16.enabled switches half precision on")
            .ignores_old("opt_level", "levels are apex's; the whole model trains in half precision")
            .ignores_old("fp16_opt_level", "levels are apex's; the whole model trains in half precision"));
  auto bf16 =
      validated("bf16", "Train in bfloat16 with fp32 master weights.",
                {
                    boolean("enabled", false, "Switch it on."),
                    boolean("immediate_grad_update", false, "Add each gradient to the fp32 sum as soon as it is there.")
                        .no_effect("gradients always go into their sum as soon as they are there"),
                    boolean("check_grad_overflow", true, "Skip a step whose gradients hold inf or nan."),
                    boolean("bf16_master_weights_and_grads", false, "Keep master weights and gradients in bf16 too.")
                        .not_built("bf16 master weights"),
                    boolean("bf16_optimizer_states", false, "Keep optimizer states in bf16 too.")
                        .not_built("bf16 optimizer states"),
                });
  for (const char* key : {"loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
                          "consecutive_hysteresis", "min_loss_scale"})
    bf16.ignores_old(key, "bfloat16 trains without a loss scale");
  bf16.ignores_old("auto_cast", "inputs of forward are not cast to bfloat16; cast them in the script");
  c.add(bf16.alias_when_absent("bfloat16"));
  auto amp = section("amp", "NVIDIA apex.",
                     {
                         boolean("enabled", false, "Switch it on."),
                         anything("*", nullptr, "Handed to apex.amp.initialize."),
                     });
  c.add(amp.not_built("apex amp"));
  auto autocast =
      section("torch_autocast", "Mixed precision by torch.autocast.",
              {
                  boolean("enabled", false, "Switch it on."),
                  text("dtype", nullptr, "Type to cast to.")
                      .one_of({"torch.float16", "fp16", "float16", "half", "torch.float32", "fp32", "float32", "float",
                               "torch.int8", "int8", "torch.bfloat16", "bf16", "bfloat16"})
                      .also(kPython),
                  list("lower_precision_safe_modules", nullptr,
                       "Full class names of modules whose parameters are cast; null: Linear and Conv1d to 3d.")
                      .items(kText),
              });
  c.add(autocast.not_built("torch autocast"));
  c.add(section(
      "data_types", "Types of single parts.",
      {
          dtype(
              "grad_accum_dtype",
              "Type in which gradients are kept and added up; null: fp32 where gradient_accumulation_steps is above 1, "
              "else the parameters' own."),
          dtype("param_dtype", "Type of the parameters."),
          dtype("buffer_dtype", "Type of floating-point buffers; null leaves them as they are."),
      }));
  c.add(text("keep_in_fp32_modules", "auto",
             "Modules whose buffers data_types.buffer_dtype leaves as they are: patterns of names, or auto: those that a "
             "model of transformers names.")
            .also(kList)
            .items(kText));

  c.rule("fp16.enabled and bf16.enabled exclude each other.", [](RuleContext& j) {
    if (j.on("fp16.enabled") && j.on("bf16.enabled")) {
      j.error({"fp16.enabled", "bf16.enabled"}, "a model trains in one of the two.", "Switch one of them off.",
              ErrorKind::kAssertion);
    }
  });
  c.rule("With dynamic loss scaling, fp16.loss_scale_window and fp16.min_loss_scale are greater than 0.",
         [](RuleContext& j) {
           if (!j.on("fp16.enabled") || j.number("fp16.loss_scale") != 0) return;
           if (j.integer("fp16.loss_scale_window") <= 0)
             j.error({"fp16.loss_scale_window"}, "must be greater than 0.", "The default is 1000.");
           if (j.number("fp16.min_loss_scale") <= 0)
             j.error({"fp16.min_loss_scale"}, "must be greater than 0.", "The default is 1.");
         });
  c.rule("fp16_master_weights_and_grads and bf16_master_weights_and_grads need ZeRO stage 1, 2 or 3.", [](RuleContext&
                                                                                                              j) {
    for (const char* key : {"fp16.fp16_master_weights_and_grads", "bf16.bf16_master_weights_and_grads"}) {
      if (j.on(key) && !stage_1_to_3(j))
        j.error({key, "zero_optimization.stage"}, "needs ZeRO stage 1, 2 or 3.", "Set \"zero_optimization.stage\".");
    }
  });
  c.rule("bf16_optimizer_states needs bf16_master_weights_and_grads.", [](RuleContext& j) {
    if (j.on("bf16.bf16_optimizer_states") && !j.on("bf16.bf16_master_weights_and_grads")) {
      j.error({"bf16.bf16_optimizer_states", "bf16.bf16_master_weights_and_grads"}, "the first needs the second.",
              "Switch the second on too.");
    }
  });
  c.rule("torch_autocast excludes zero_quantized_weights.", [](RuleContext& j) {
    if (j.on("torch_autocast.enabled") && j.on("zero_optimization.zero_quantized_weights")) {
      j.error({"torch_autocast.enabled", "zero_optimization.zero_quantized_weights"}, "the two exclude each other.",
              "Switch one of them off.");
    }
  });
}

}  // namespace ds::config
