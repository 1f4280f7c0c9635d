// The configuration of init_inference.
#include "config/schema.h"
#include "config/sections/zero.h"

namespace ds::config {

namespace {

Field quantizer(const char* name, const char* doc, bool is_weight) {
  Field out =
      validated(name, doc,
                {
                    boolean("enabled", true, "Switch it on."),
                    integer("num_bits", 8, "Bits.").above(0),
                    text("q_type", "symmetric", "Range of the quantized values.").one_of({"symmetric", "asymmetric"}),
                    integer("q_groups", 1, "Groups per tensor.").above(0),
                });
  if (is_weight) {
    out.fields.push_back(table("quantized_initialization", EmptyTable{}, "Quantize while the model is made."));
    out.fields.push_back(table("post_init_quant", EmptyTable{}, "Quantize afterwards, by pattern of module names."));
  }
  return out;
}

}  // namespace

DS_CONFIG_CHAPTER(10, kInference, "Keys of init_inference") {
  c.add(boolean("kernel_inject", false, "Replace layers by fused kernels.").alias("replace_with_kernel_inject"));
  c.add(text("dtype", "torch.float16", "Type of the weights.")
            .one_of({"torch.float16", "fp16", "float16", "half", "torch.float32", "fp32", "float32", "float",
                     "torch.bfloat16", "bf16", "bfloat16", "bfloat", "torch.int8", "int8"})
            .also(kPython));
  auto tp = validated("tp", "Split layers over ranks.",
                      {
                          boolean("enabled", true, "Switch it on."),
                          integer("tp_size", 1, "Ranks.").at_least(1),
                          integer("tp_grain_size", 64, "Sizes are multiples of this.").at_least(1),
                          python("mpu", nullptr, "Object that knows the groups."),
                          python("tp_group", nullptr, "The group itself."),
                      });
  c.add(tp.alias("tensor_parallel"));
  c.add(boolean("enable_cuda_graph", false, "Capture forward in a CUDA graph."));
  c.add(boolean("use_triton", false, "Use Triton kernels."));
  c.add(boolean("triton_autotune", false, "Tune them."));
  c.add(zero_section("zero", "As zero_optimization."));
  c.add(boolean("tm", true, "The attention mask is triangular.").alias("triangular_masking"));
  auto moe = validated("moe", "Mixture of experts.",
                       {
                           boolean("enabled", true, "Switch it on."),
                           integer("ep_size", 1, "Ranks that share the experts.").at_least(1),
                           list("num_experts", std::vector<int64_t>{1}, "Experts per layer.")
                               .items(kInt)
                               .items_at_least(1)
                               .alias("moe_experts"),
                           text("type", "standard", "Kind of MoE layer.").one_of({"standard", "residual"}),
                           python("ep_mp_group", nullptr, "Group of an expert's slices."),
                           python("expert_group", nullptr, "Group of the experts.").alias("ep_group"),
                       });
  c.add(moe.bool_sets("enabled", true, false, ""));
  c.add(boolean("keep_module_on_host", false, "Split on the host, then move."));
  c.add(validated(
      "quant", "Quantization.",
      {
          boolean("enabled", true, "Switch it on."),
          quantizer("activation", "Activations.", false),
          quantizer("weight", "Weights.", true),
          validated("qkv", "The fused query, key and value weights.", {boolean("enabled", true, "Switch it on.")}),
      }));
  c.add(text("checkpoint", nullptr, "Checkpoint to load: a file or its description.").also(kTable));
  c.add(text("base_dir", "", "Folder that its names are relative to."));
  c.add(boolean("set_empty_params", false, "Make layers without memory before loading."));
  c.add(text("save_mp_checkpoint_path", nullptr, "Folder for a copy that is split over ranks."));
  auto checkpoint =
      validated("ckpt_config", "The last keys in one place.",
                {
                    text("checkpoint_dir", nullptr, "Folder of the checkpoint."),
                    text("save_mp_checkpoint_path", nullptr, "Folder for a copy that is split over ranks."),
                    text("base_dir", nullptr, "Folder that its names are relative to."),
                });
  c.add(checkpoint.alias("checkpoint_config"));
  c.add(boolean("return_tuple", true, "Layers return tuples."));
  c.add(integer("training_mp_size", 1, "Model-parallel ranks the checkpoint was trained with.").at_least(1));
  c.add(text("replace_method", "auto", "Has no effect.").deprecated());
  c.add(
      table("injection_dict", nullptr, "Layers that are replaced, by class.").also(kPython).alias("injection_policy"));
  c.add(list("injection_policy_tuple", nullptr, "Names of linear layers whose output is reduced.").also(kPython));
  c.add(table("args", nullptr, "Further arguments.").alias("config"));
  c.add(integer("max_tokens", 1024, "Most tokens of a sequence.").above(0).alias("max_out_tokens"));
  c.add(integer("min_tokens", 1, "Fewest tokens there must be room for.").above(0).alias("min_out_tokens"));
  c.add(boolean("transposed_mode", false, "Weights are stored transposed."));
}

}  // namespace ds::config
