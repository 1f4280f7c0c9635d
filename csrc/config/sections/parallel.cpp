// Keys of tensor, expert and pipeline parallelism.
#include "config/schema.h"

namespace ds::config {

namespace {

Field name(const char* key, const char* doc) { return text(key, nullptr, doc); }
Field flag(const char* key, const char* doc) { return boolean(key, false, doc).or_null().fallback_to(nullptr); }

Field layer_specs() {
  Field out = list("layer_specs", std::vector<std::string>{}, "Split of parameters, by name.");
  out.fields = {
      list("patterns", std::vector<std::string>{}, "Regular expressions for parameter names.").items(kText),
      text("partition_type", "column", "Kind of the split.").one_of_any_case({"column", "row", "skip"}),
      boolean("gather_output", false, "Gather the output."),
      boolean("grad_allreduce", false, "Reduce its gradient over the tensor-parallel ranks."),
      list("shape", nullptr, "Shape in sub-tensors, for fused parameters."),
      integer("partition_dim", nullptr, "Dimension to split."),
      list("model_types", nullptr, "Model types it is for.").items(kText),
  };
  return out;
}

}  // namespace

DS_CONFIG_CHAPTER(95, kTraining, "Pipeline, tensor and expert parallelism") {
  c.add(section(
            "pipeline", "Settings of PipelineModule.",
            {
                text("stages", "auto", "Number of stages: that of the module, which decides.").also(kInt).above(0),
                text("partition", "best",
                     "Method that divides the layers among stages: that of the module, which decides."),
                text("schedule", "1f1b", "Order in which stages compute; auto: the fastest that fits memory_limit.")
                    .one_of({"1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "auto"}),
                integer("memory_limit", 0, "Bytes of states and activations of a stage, for schedule auto; 0: any.")
                    .at_least(0),
                boolean("use_reentrant", true, "Recomputed segments run re-entrantly."),
                boolean("seed_layers", false, "Seed each layer by its index."),
                integer("activation_checkpoint_interval", 0, "Layers per recomputed segment; 0 keeps all activations.")
                    .at_least(0),
                boolean("pipe_partitioned", true, "Shard activations over model-parallel ranks between stages."),
                boolean("grad_partitioned", true, "Shard their gradients, too."),
            })
            .keeps_unknown("only the keys in the table below are read"));

  auto tensor = validated(
      "tensor_parallel", "Split layers over ranks without a change of the model: AutoTP.",
      {
          text("dtype", "torch.float16", "Type of the parameters.").also(kPython),
          integer("autotp_size", 0, "Ranks that share a layer; 0 and 1 switch it off.").at_least(0).off_at(1),
          boolean("tp_overlap_comm", false,
                  "The all-reduce of an input's gradient runs while the gradient of the weight is computed."),
          boolean("verify", true,
                  "Before training one block of each kind runs cut and whole, and a difference is an error."),
          flag("vocab_parallel_lm_head",
               "The layer that gives the words, the embedding that shares its weight and the loss are cut over the "
               "words; null: they stay whole."),
          text("vocab_parallel_ce_backend", "torch",
               "Loss over cut words. liger: its gradient takes the place of the logits, which nobody can read "
               "afterwards.")
              .one_of({"torch", "liger"}),
          boolean("split_sequence", false,
                  "Between blocks each rank has a part of every sequence (Megatron's sequence parallelism)."),
          validated("tp", "The group of ranks.",
                    {
                        integer("tp_size", 1, "Ranks.").at_least(1),
                        integer("tp_grain_size", 1, "Sizes are multiples of this.").at_least(1),
                        python("mpu", nullptr, "Object that knows the groups."),
                        python("tp_group", nullptr, "The group itself."),
                    })
              .alias("tensor_parallel"),
          list("injection_policy_tuple", nullptr, "Names of linear layers whose output is reduced.").also(kPython),
          section("partition_config", "Split of parameters.",
                  {
                      integer("tp_size", 1, "Ranks.").at_least(1),
                      layer_specs(),
                      integer("embedding_partition_dim", 1, "Dimension in which embeddings are split.")
                          .at_least(0)
                          .no_effect("embeddings that a rule cuts are cut along their features"),
                      list("lm_head_patterns", std::vector<std::string>{"lm_head", "embed_out"},
                           "Names of the output layer.")
                          .items(kText)
                          .no_effect("a rule says by gather_output what an output layer gives"),
                      boolean("use_default_specs", true, "The rules of preset_model follow those of layer_specs."),
                      boolean("strict_mode", false, "A parameter that no pattern names is an error."),
                  })
              .absent_is_null(),
          text("preset_model", nullptr, "Known model whose splitting is used.")
              .one_of({"llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"}),
          boolean("keep_module_on_host", false, "Split on the host, then move.")
              .no_effect("parameters are cut where they are, one by one"),
          boolean("kernel_inject", false, "Use fused kernels.")
              .alias("replace_with_kernel_inject")
              .no_effect("the model's own layers run"),
      });
  c.add(tensor);

  auto expert =
      section("expert_parallel", "Split experts over ranks without a change of the model: AutoEP.",
              {
                  boolean("enabled", false, "Switch it on."),
                  integer("autoep_size", 1, "Ranks that share the experts.").at_least(1),
                  integer("expert_tensor_parallel_size", 1,
                          "Ranks that share one expert. Only 1 is built; raise autoep_size instead.")
                      .at_least(1),
                  boolean("validate_folding_routing", false,
                          "Compare the routes of tensor-parallel ranks, which have the same tokens, in each forward."),
                  name("preset_model", "Known model whose names are used."),
                  name("moe_layer_pattern", "Regular expression for MoE layers."),
                  name("expert_pattern", "Regular expression for experts."),
                  name("router_pattern", "Regular expression for routers."),
                  boolean("use_grouped_mm", true, "One grouped matrix product for all experts."),
                  boolean("disable_triton_grouped_mm", false, "Do not use Triton for the grouped product.")
                      .no_effect("there is no Triton product here"),
                  flag("route_norm", "Normalise routing weights; null: as the model does."),
                  number("route_scale", 1.0, "Factor on routing weights."),
                  text("score_apply", "auto", "Place where routing weights are applied, before or after the experts.")
                      .one_of({"auto", "pre", "post"}),
                  text("combine_impl", "auto", "Method that combines outputs.")
                      .one_of({"auto", "weighted_sum", "legacy_bmm"})
                      .no_effect("all of them are the same sum in fp32, which one kernel computes"),
                  integer("num_expert_groups", nullptr, "Groups of experts for limited routing.").at_least(1),
                  integer("num_limited_groups", nullptr, "Groups a token may go to.").at_least(1),
                  text("score_func", "auto", "Scores from logits.").one_of({"auto", "softmax", "sigmoid"}),
                  integer("top_k", "auto", "Experts per token.").also(kText).one_of({"auto"}).at_least(1),
                  anything("load_balance_coeff", nullptr, "Only null.").computed("unset"),
                  number("routed_scaling_factor", "auto", "Factor on the routed output.").also(kText).one_of({"auto"}),
                  name("expert_w1", "Name of the first weight of an expert."),
                  name("expert_w2", "Name of the second weight of an expert."),
                  anything("expert_w3", nullptr, "Name of the third weight of an expert; null: there is none.")
                      .computed("unset"),
                  name("num_experts_attr", "Attribute of the model's config that counts experts.")
                      .no_effect("experts are counted in the layer itself"),
                  name("top_k_attr", "Attribute of the model's config that counts experts per token."),
                  flag("has_shared_experts", "The model has experts that all tokens use; null: as its preset says."),
                  name("shared_experts_pattern", "Regular expression for experts that all tokens use."),
                  name("shared_experts_gate_pattern", "Regular expression for the gate of these experts."),
              });
  c.add(expert.ignores_unknown());
  c.rule("expert_parallel.load_balance_coeff is null.", [](RuleContext& j) {
    if (!j.is_null("expert_parallel.load_balance_coeff")) {
      j.error({"expert_parallel.load_balance_coeff"}, "the model has a load-balancing loss of its own.",
              "Set it to null or leave it out.");
    }
  });
}

}  // namespace ds::config
