// Keys of communication: dtypes, divisions, sparse gradients, the comms logger.
#include "config/schema.h"

namespace ds::config {

namespace {

std::string lower(std::string text) {
  for (char& c : text) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return text;
}

bool is_16_bit(const std::string& type) { return type == "fp16" || type == "bf16"; }

// In which type gradients are kept and sent, why, and what that costs; deepspeed/engine/parts/assembly.py does so.
std::vector<std::string> tell_of_gradients(const RuleContext& j) {
  const std::string accumulated = lower(j.text("data_types.grad_accum_dtype"));
  const bool shares_sequences = j.integer("sequence_parallel_size") > 1;
  const std::string sent_key = shares_sequences ? "seq_parallel_communication_data_type" : "communication_data_type";
  const std::string sent = lower(j.text(sent_key));
  const int64_t stage = j.integer("zero_optimization.stage"), steps = j.integer("gradient_accumulation_steps");
  std::string param = lower(j.text("data_types.param_dtype"));
  if (param.empty()) param = j.on("fp16.enabled") ? "fp16" : j.on("bf16.enabled") ? "bf16" : "fp32";
  const std::string kept = !accumulated.empty() ? accumulated : steps > 1 ? "fp32" : param;

  const auto cost = [&](const std::string& type) {
    return std::string(is_16_bit(type) ? "2" : "4") +
           (stage >= 2 ? "/N bytes per parameter on each of N ranks" : " bytes per parameter on each rank");
  };
  std::string why = "the type of the parameters, since gradient_accumulation_steps is 1 and nothing accumulates";
  if (!accumulated.empty()) {
    why = "data_types.grad_accum_dtype says so";
  } else if (steps > 1) {
    why = "gradient_accumulation_steps is " + std::to_string(steps) + ", and fp32 keeps the sum exact";
    if (is_16_bit(param)) why += "; data_types.grad_accum_dtype \"" + param + "\" makes it " + cost(param);
  }
  std::vector<std::string> lines{"kept in " + kept + ", " + cost(kept) + ": " + why};
  if (sent.empty()) {
    lines.push_back("sent in " + kept + ", the type they are kept in");
  } else {
    lines.push_back("sent in " + sent + ": " + sent_key + " says so");
    if (sent != kept)
      lines.back() += std::string("; the copy that travels takes ") + (is_16_bit(sent) ? "2" : "4") +
                      (stage == 0 ? " bytes per parameter more" : " bytes for each element of a bucket");
  }
  if (stage == 0 && kept == param) {
    lines.push_back("between backward and step they are the parameters' .grad, and what is changed there counts");
  } else {
    lines.push_back(std::string("the parameters have no .grad between backward and step ") +
                    (stage == 0 ? "(its type would differ)" : "(ZeRO has cut it)") +
                    ": use deepspeed.utils.safe_get_full_grad and safe_set_full_grad");
  }
  return lines;
}

}  // namespace

DS_CONFIG_CHAPTER(35, kTraining, "Gradients and communication") {
  c.add(text("communication_data_type", nullptr,
             "Type in which gradients are reduced; null: the type that they are kept in.")
            .one_of_any_case({"fp32", "fp16", "bf16"})
            .raises(ErrorKind::kValue));
  c.add(text("seq_parallel_communication_data_type", "fp32",
             "Type in which gradients are reduced where ranks share a sequence; null: the type that they are kept in.")
            .one_of_any_case({"fp32", "fp16", "bf16"})
            .or_null());
  c.add(boolean("prescale_gradients", false, "Divide gradients before the reduction instead of after."));
  c.add(number("gradient_predivide_factor", 1.0,
               "With prescale_gradients: gradients are divided by this before the reduction, and by the rest after it.")
            .above(0));
  c.add(text("gradient_allreduce_op", "mean", "Average or sum gradients over ranks.")
            .one_of_any_case({"mean", "sum"})
            .raises(ErrorKind::kValue, "Invalid gradient_allreduce_op: "));
  c.add(boolean("sparse_gradients", false,
                "Reduce only the rows that a step has touched in gradients of embeddings (torch.nn.Embedding, "
                "EmbeddingBag). Stage 0 only."));
  c.add(boolean("disable_allgather", false, "Broadcast updated parameters instead of gathering them.")
            .not_built("ZeRO without all-gather"));
  c.add(boolean("zero_allow_untested_optimizer", false,
                "Let ZeRO wrap an optimizer of your own that it was not tested with."));
  c.add(boolean("zero_force_ds_cpu_optimizer", true, "With offload: insist on DeepSpeedCPUAdam."));
  c.add(boolean("use_data_before_expert_parallelism", false,
                "Ranks with the same experts are neighbours; else ranks that share a layer's experts are."));
  c.add(integer("sequence_parallel_size", nullptr,
                "Ranks that share one sequence; divides the data-parallel size when no mpu is given.")
            .above(0));
  c.add(integer("data_parallel_size", nullptr, "Data-parallel ranks; with sequence_parallel_size it makes a 2-D mesh.")
            .above(0));
  c.add(
      integer("allgather_size", 500000000, "Old key of the bucket size, read when zero_optimization is a bare boolean.")
          .at_least(0)
          .deprecated_for("zero_optimization.allgather_bucket_size"));
  // Ours, not DeepSpeed's.
  c.add(section("comm", "Collectives between ranks.",
                {number("timeout", nullptr,
                        "Seconds that ranks wait for each other before all give up and name who is missing; null: the "
                        "timeout given to init_distributed, else 30 minutes.")
                     .above(0)
                     .or_null()
                     .overridden_by("DS_COMM_TIMEOUT_S")}));
  c.rule("sparse_gradients excludes the ZeRO stages 1 to 3.", [](RuleContext& j) {
    if (j.on("sparse_gradients") && j.integer("zero_optimization.stage") > 0)
      j.error({"sparse_gradients", "zero_optimization.stage"},
              "the sharded stages reduce gradients of embeddings like all others, as flat shares of every rank.",
              "Use stage 0, or leave sparse_gradients out.");
  });
  c.rule("gradient_allreduce_op \"sum\" excludes ZeRO stage 3, zenflow and compile.deepcompile.", [](RuleContext& j) {
    if (j.text("gradient_allreduce_op") != "sum") return;
    const char* fix = "Use \"mean\".";
    if (j.integer("zero_optimization.stage") == 3)
      j.error({"gradient_allreduce_op", "zero_optimization.stage"}, "\"sum\" is not supported with ZeRO stage 3.", fix);
    if (!j.is_null("zero_optimization.zenflow"))
      j.error({"gradient_allreduce_op", "zero_optimization.zenflow"}, "\"sum\" is not supported with ZenFlow.", fix);
    if (j.on("compile.deepcompile"))
      j.error({"gradient_allreduce_op", "compile.deepcompile"}, "\"sum\" is not supported with DeepCompile.", fix);
  });
  c.consequence("Gradients", tell_of_gradients);
  c.rule("gradient_predivide_factor has an effect with prescale_gradients only.", [](RuleContext& j) {
    if (j.number("gradient_predivide_factor") != 1.0 && !j.on("prescale_gradients")) {
      j.warn({"gradient_predivide_factor", "prescale_gradients"}, "the first has no effect without the second.");
    }
  });
  c.rule("allgather_size sets zero_optimization.allgather_bucket_size when zero_optimization is a bare boolean.",
         [](RuleContext& j) {
           if (!j.given("allgather_size")) return;
           if (j.is_bare_bool("zero_optimization")) {
             j.derive("zero_optimization.allgather_bucket_size", j.integer("allgather_size"), "allgather_size");
           } else {
             j.warn({"allgather_size"}, "has an effect only when zero_optimization is true or false.");
           }
         });
}

}  // namespace ds::config
