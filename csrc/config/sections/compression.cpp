// The sections of compression: quantization, pruning, layer reduction, eigenvalues.
#include "config/schema.h"

namespace ds::config {

namespace {

using Fields = std::vector<Field>;

Field group(Fields params) {
  return section("<group name>", "One group of modules with settings of its own.",
                 {
                     section("params", "Settings of the group.", std::move(params)),
                     text("modules", "*", "Modules of the group: names or patterns.").also(kList).items(kText),
                     list("related_modules", nullptr, "Modules that shrink along with them."),
                 });
}

Field method(std::string name, std::string doc, Fields shared, Fields params) {
  auto common = section("shared_parameters", "Settings of all groups.", std::move(shared));
  auto groups = section("different_groups", "Groups by name.", {group(std::move(params))});
  return section(name, std::move(doc), {common.not_built("compression by " + name), std::move(groups)});
}

Field offset(int64_t fallback) { return integer("schedule_offset", fallback, "Step at which it starts.").at_least(0); }
Field dense_ratio() {
  return number("dense_ratio", nullptr, "Share of the weights that stays.").at_least(0).at_most(1).required();
}
Field bits(const char* name, const char* doc) { return integer(name, nullptr, doc).at_least(1).required(); }
Field scheme() {
  return text("quantization_type", "symmetric", "Range of the quantized values.").one_of({"symmetric", "asymmetric"});
}
Field pruning_method(const char* fallback, std::vector<Literal> choices) {
  return text("method", fallback, "Method that chooses weights.").one_of(std::move(choices));
}

const char* const kMethods[] = {"weight_quantization", "activation_quantization", "sparse_pruning", "row_pruning",
                                "head_pruning",        "channel_pruning"};

}  // namespace

DS_CONFIG_CHAPTER(80, kTraining, "Compression") {
  c.add(section(
      "compression_training", "Make the model smaller while it trains.",
      {
          section("layer_reduction", "Start from some layers of a teacher.",
                  {
                      enabled(),
                      integer("keep_number_layer", nullptr, "Layers to keep.").above(0),
                      text("module_name_prefix", nullptr, "Place of the layers in the model."),
                      list("teacher_layer", nullptr, "Numbers of these layers in the teacher.").items(kInt),
                      list("other_module_name", nullptr, "Further modules to copy.").items(kText),
                  })
              .not_built("layer reduction"),
          method("weight_quantization", "Quantize weights.",
                 {
                     enabled(),
                     boolean("quantizer_kernel", false, "Use the fused kernel."),
                     offset(0),
                     integer("quantize_groups", 1, "Groups per weight.").above(0),
                     boolean("quantize_verbose", false, "Print changes of the bits."),
                     scheme(),
                     text("rounding", "nearest", "Rounding of the values.").one_of({"nearest", "stochastic"}),
                     boolean("quantize_weight_in_forward", false, "Quantize in forward rather than in the step."),
                     section("fp16_mixed_quantize", "Mix quantized and fp16 weights.",
                             {
                                 enabled(),
                                 number("quantize_change_ratio", 0.001, "Rate at which the mix changes.").at_least(0),
                             }),
                 },
                 {bits("start_bits", "Bits at the start."), bits("target_bits", "Bits at the end."),
                  integer("quantization_period", 1, "Steps per bit; 0 counts as 1.").at_least(0)}),
          method("activation_quantization", "Quantize activations.",
                 {
                     enabled(),
                     scheme(),
                     text("range_calibration", "dynamic", "Time at which the range is measured.")
                         .one_of({"dynamic", "static"}),
                     offset(1000),
                 },
                 {bits("bits", "Bits.")}),
          method("sparse_pruning", "Zero single weights.",
                 {
                     enabled(),
                     pruning_method("l1", {"l1", "topk", "snip_momentum"}),
                     offset(1000),
                     integer("schedule_offset_end", nullptr, "snip_momentum: the last step of pruning.")
                         .at_least(0)
                         .computed("= schedule_offset"),
                     integer("schedule_offset_stride", 1, "snip_momentum: steps between prunings.").above(0),
                     text("block_pattern", "4x1", "snip_momentum: shape of the blocks."),
                     number("dense_ratio", 0.1, "snip_momentum: share of the weights that stays.").above(0).below(1),
                     list("excluded_modules", std::vector<std::string>{}, "snip_momentum: modules left alone.")
                         .items(kText),
                 },
                 {dense_ratio()}),
          method("row_pruning", "Remove rows of matrices.",
                 {enabled(), pruning_method("l1", {"l1", "topk"}), offset(1000)}, {dense_ratio()}),
          method("head_pruning", "Remove attention heads.",
                 {
                     enabled(),
                     pruning_method("topk", {"topk", "l1"}),
                     offset(1000),
                     integer("num_heads", nullptr, "Heads per layer.").above(0),
                 },
                 {dense_ratio()}),
          method("channel_pruning", "Remove channels of convolutions.",
                 {enabled(), pruning_method("l1", {"l1", "topk"}), offset(1000)}, {dense_ratio()}),
      }));
  c.add(section(
            "quantize_training", "Older settings of quantization, read when compression_training quantizes weights.",
            {
                section("eigenvalue", "Let curvature decide the rate at which layers lose bits. Switched off for good.",
                        {
                            boolean("enabled", false, "true is refused.").one_of({false}).raises(ErrorKind::kAssertion),
                            boolean("verbose", false, "Print the values."),
                            integer("max_iter", 100, "Most power iterations.").above(0),
                            number("tol", 0.01, "Relative change at which they stop.").above(0),
                            number("stability", 1e-6, "Added to norms.").at_least(0),
                            integer("gas_boundary_resolution", 1, "Optimizer steps between measurements.").above(0),
                            text("layer_name", "bert.encoder.layer", "Place of the layers in the model."),
                            integer("layer_num", 0, "Number of these layers.").at_least(0),
                        }),
            })
            .ignores_unknown()
            .waits_for("quantized training"));
  c.add(validated("weight_quantization", "Weights quantized for inference with ZeRO stage 3.",
                  {
                      boolean("enabled", true, "Switch it on."),
                      integer("num_bits", 8, "Bits per weight.").above(0),
                      text("q_type", "symmetric", "Range of the quantized values.").one_of({"symmetric", "asymmetric"}),
                      integer("q_groups", 1, "Groups per weight.").above(0),
                      table("quantized_initialization", EmptyTable{},
                            "Quantize while the model is made: num_bits, group_size, group_dim, symmetric."),
                      table("post_init_quant", EmptyTable{},
                            "Quantize afterwards, by pattern of module names: the same four."),
                  })
            .absent_is_null()
            .not_built("quantized weights", kWhenPresent));

  c.rule(
      "compression_training: different_groups is required when a method is enabled (not for snip_momentum), and "
      "head_pruning.num_heads.",
      [](RuleContext& j) {
        for (const char* name : kMethods) {
          const std::string at = std::string("compression_training.") + name;
          if (!j.on(at + ".shared_parameters.enabled")) continue;
          const bool snip = j.text(at + ".shared_parameters.method") == "snip_momentum";
          if (!snip && j.size(at + ".different_groups") == 0) {
            j.error({at + ".different_groups", at + ".shared_parameters.enabled"},
                    "the first is required when the second is true.", "Add at least one group.");
          }
        }
        if (j.on("compression_training.head_pruning.shared_parameters.enabled") &&
            j.is_null("compression_training.head_pruning.shared_parameters.num_heads")) {
          j.error({"compression_training.head_pruning.shared_parameters.num_heads"},
                  "required when head pruning is enabled.", "Add it.");
        }
      });
  c.rule("compression_training.sparse_pruning: schedule_offset_end is at least schedule_offset.", [](RuleContext& j) {
    const std::string at = "compression_training.sparse_pruning.shared_parameters.";
    if (j.is_null(at + "schedule_offset_end")) {
      if (j.text(at + "method") == "snip_momentum")
        j.derive(at + "schedule_offset_end", j.integer(at + "schedule_offset"), "schedule_offset");
    } else if (j.integer(at + "schedule_offset_end") < j.integer(at + "schedule_offset")) {
      j.error({at + "schedule_offset_end", at + "schedule_offset"}, "pruning ends before it starts.",
              "Raise \"schedule_offset_end\".");
    }
  });
}

}  // namespace ds::config
