// The rules of ZeRO++ and MixZ++; their keys are in the section zero_optimization.
#include "config/schema.h"

namespace ds::config {

DS_CONFIG_CHAPTER(51, kTraining, "ZeRO++") {
  c.rule("zero_hpz_partition_size, zero_quantized_weights and zero_quantized_nontrainable_weights are for stage 3.",
         [](RuleContext& j) {
           const std::string zero = "zero_optimization.";
           if (j.integer(zero + "stage") == 3) return;
           const auto warn = [&](const std::string& path) {
             j.warn({path, "zero_optimization.stage"},
                    "has no effect below ZeRO stage 3, where every rank has all parameters.");
           };
           if (j.integer(zero + "zero_hpz_partition_size") > 1) warn(zero + "zero_hpz_partition_size");
           if (j.on(zero + "zero_quantized_weights")) warn(zero + "zero_quantized_weights");
           if (j.on(zero + "zero_quantized_nontrainable_weights")) warn(zero + "zero_quantized_nontrainable_weights");
         });
  c.rule("zero_quantized_gradients is for stages 1 to 3, and zeropp_loco_param needs it.", [](RuleContext& j) {
    const std::string zero = "zero_optimization.", blocks = zero + "zero_quantized_gradients";
    const std::string loco = zero + "zeropp_loco_param";
    if (j.on(blocks) && j.integer(zero + "stage") == 0)
      j.warn({blocks, zero + "stage"}, "has no effect at ZeRO stage 0, where every rank has whole gradients.");
    if (!j.is_null(loco) && !j.on(blocks))
      j.error({loco, blocks}, "gradients are not reduced as codes, so LoCo has no error to feed back.",
              "Set zero_quantized_gradients to true, or leave zeropp_loco_param out.");
  });
  c.rule("mics_hierarchical_params_gather is for stage 3 with mics_shard_size.", [](RuleContext& j) {
    const std::string zero = "zero_optimization.", gather = zero + "mics_hierarchical_params_gather";
    if (!j.on(gather)) return;
    if (j.integer(zero + "stage") != 3)
      j.warn({gather, zero + "stage"}, "has no effect below ZeRO stage 3, where every rank has all parameters.");
    else if (j.integer(zero + "mics_shard_size") <= 0)
      j.warn({gather, zero + "mics_shard_size"},
             "has no effect without mics_shard_size. zero_hpz_partition_size does the same for plain stage 3.");
  });
  c.rule("zero_hpz_partition_size and mics_shard_size exclude each other.", [](RuleContext& j) {
    const std::string hpz = "zero_optimization.zero_hpz_partition_size", mics = "zero_optimization.mics_shard_size";
    if (j.integer(hpz) > 1 && j.integer(mics) > 0)
      j.error({hpz, mics}, "the two exclude each other: with MiCS a group of ranks has all parameters already.",
              "Leave one of them out.");
  });
}

}  // namespace ds::config
