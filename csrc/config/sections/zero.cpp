#include "config/sections/zero.h"

#include "base/ranges.h"
#include "config/schema.h"

namespace ds::config {

namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

Field size(std::string name, int64_t fallback, std::string doc) {
  return integer(std::move(name), fallback, std::move(doc)).at_least(0);
}
Field share(std::string name, double fallback, std::string doc) {
  return number(std::move(name), fallback, std::move(doc)).at_least(0).at_most(1);
}
Field device() { return text("device", "none", "Device that they go to.").one_of({"none", "cpu", "nvme"}); }
Field nvme_path() { return text("nvme_path", nullptr, "Folder on the NVMe drive, for device nvme."); }
Field pin_memory() { return boolean("pin_memory", true, "Use page-locked host memory."); }

Field offload_param() {
  return validated("offload_param", "Place where parameters rest between uses (stage 3).",
                   {
                       device(),
                       nvme_path(),
                       size("buffer_count", 5, "Buffers for parameters on NVMe."),
                       size("buffer_size", 100000000, "Elements per buffer."),
                       size("max_in_cpu", 1000000000, "Elements kept in host memory when the rest is on NVMe."),
                       pin_memory(),
                   })
      .absent_is_null();
}

Field offload_optimizer() {
  return validated(
             "offload_optimizer",
             "Place where masters, gradients and optimizer states rest, and where the step is done.",
             {
                 device(),
                 nvme_path(),
                 size("buffer_count", 4,
                      "Buffers, each of a bucket, for a step on NVMe; at least the states per parameter plus two. Also "
                      "the number of buckets of gradients that may wait on the device to leave it (0: any number)."),
                 pin_memory(),
                 boolean("pipeline_read", false,
                         "Read the next bucket's states from NVMe while this one is updated. Needs buffer_count more "
                         "buffers."),
                 boolean("pipeline_write", false,
                         "Write the last bucket's states to NVMe while this one is updated. Needs buffer_count more "
                         "buffers."),
                 boolean("fast_init", false, "Write no zeros into new files on NVMe: they read as zeros as they are."),
                 share("ratio", 1.0,
                       "Share of the elements, in whole buckets, that rest there; the others stay on the device."),
                 boolean("super_offload", false,
                         "Step each bucket on the host as soon as its gradients are there, while backward goes on."),
                 share("cpuadam_cores_perc", 0.8,
                       "Share of torch's threads that make these steps, with super_offload; at least one."),
             })
      .absent_is_null();
}

Field zenflow() {
  const auto interval = [](const char* name, const char* doc) {
    return integer(name, "auto", doc).also(kText).one_of({"auto"}).above(0);
  };
  return validated(
             "zenflow",
             "Update a few columns of each matrix in every step, and the rest once in an interval of steps, on the "
             "host.",
             {
                 share("topk_ratio", 0.1, "Share of the columns of each matrix that is updated in every step."),
                 text(
                     "select_strategy", "auto",
                     "Unit of select_interval, after which columns are chosen anew; auto: epochs where their length is "
                     "known, else steps.")
                     .one_of({"auto", "step", "epoch"}),
                 interval("select_interval", "Steps or epochs between choices; auto: 1 epoch, or 100 steps."),
                 interval("update_interval",
                          "Steps between updates of the rest; auto: until its gradients are as large as the chosen "
                          "ones, at most 16."),
                 boolean("overlap_step", false,
                         "Update the rest beside the next steps; the model gets it an interval later."),
                 boolean("offload", false, "Masters and states of the chosen columns rest on the host, too."),
                 share("auto_ratio", 0.99,
                       "With update_interval auto: the rest's gradients of an interval end it when, by root mean "
                       "square, they are that share of the chosen ones of a step."),
                 integer("full_warm_up_rounds", 0, "Steps that update everything, before the first choice.")
                     .at_least(0),
                 share("pt_reserved_cores_perc", 0.5,
                       "With overlap_step: share of torch's threads that the update of the rest leaves alone."),
                 integer("steps_per_epoch", nullptr,
                         "Steps of an epoch; null: of the data loader that initialize makes of training_data.")
                     .above(0),
             })
      .absent_is_null();
}

Field leaf_module() {
  const auto names = [](const char* name, Literal fallback, const char* doc) {
    return list(name, std::move(fallback), doc).items(kText).bare_text().unique().null_for_default();
  };
  return validated(
      "leaf_module", "Modules whose parameters are gathered as one unit (stage 3).",
      {
          names("classes",
                std::vector<std::string>{"transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
                                         "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
                                         "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock"},
                "Full class names."),
          names("names", std::vector<std::string>{}, "Names of modules in the model."),
          names("name_suffixes", std::vector<std::string>{}, "Ends of such names."),
      });
}

std::vector<Field> stage_3_fields() {
  return {
      size("stage3_prefetch_bucket_size", 50000000, "Elements fetched ahead; the last module of them may exceed it.")
          .alias("prefetch_bucket_size"),
      size("stage3_param_persistence_threshold", 100000, "Parameters with fewer elements stay gathered.")
          .alias("param_persistence_threshold"),
      integer("stage3_param_persitance_threshold", nullptr, "A misspelling in old configurations.")
          .at_least(0)
          .deprecated_for("stage3_param_persistence_threshold")
          .forwards(),
      size("stage3_model_persistence_threshold", kNoLimit, "Elements that may stay gathered in all.")
          .alias("model_persistence_threshold"),
      size("stage3_max_live_parameters", 1000000000, "Elements that may be gathered at one time.")
          .alias("max_live_parameters"),
      size("stage3_max_reuse_distance", 1000000000,
           "A parameter that is used again within this many elements is not released.")
          .alias("max_reuse_distance"),
      boolean("stage3_gather_16bit_weights_on_model_save", false, "save_16bit_model gathers the whole weights.")
          .alias("gather_16bit_weights_on_model_save"),
      integer("stage3_module_granularity_threshold", 0,
              "Modules with fewer elements per sub-module are gathered as one unit; 0 never.")
          .at_least(0)
          .alias("module_granularity_threshold"),
      boolean("stage3_use_all_reduce_for_fetch_params", false,
              "Gather parameters by an all-reduce of zeros and slices.")
          .no_effect("gathers copy each slice to its offset")
          .alias("use_all_reduce_for_fetch_params"),
      boolean("stage3_allgather_sequential", false, "Gather parameters one after the other, not into one buffer.")
          .no_effect("gathers need no common buffer")
          .alias("allgather_sequential"),
      boolean("stage3_gather_fp16_weights_on_model_save", false, "Old name.")
          .deprecated_for("stage3_gather_16bit_weights_on_model_save")
          .forwards(),
  };
}

}  // namespace

Field zero_section(std::string name, std::string doc) {
  Field out = validated(
      std::move(name), std::move(doc),
      {
          integer("stage", 0, "0: nothing sharded, 1: optimizer states, 2: and gradients, 3: and parameters.")
              .one_of({0, 1, 2, 3})
              .raises(ErrorKind::kAssertion),
          boolean("contiguous_gradients", true, "Copy gradients into one buffer as backward makes them.")
              .no_effect("gradients always go into one buffer"),
          boolean("reduce_scatter", true, "Reduce each gradient only to the rank that needs it."),
          size("reduce_bucket_size", 500000000, "Elements per reduction."),
          boolean("use_multi_rank_bucket_allreduce", true,
                  "Reduce buckets that belong to several ranks by one all-reduce.")
              .no_effect("every bucket belongs to all ranks in equal parts"),
          boolean("allgather_partitions", true, "Gather updated parameters by all-gather, not by broadcasts."),
          size("allgather_bucket_size", 500000000, "Elements per gather."),
          boolean("overlap_comm", false, "Reduce gradients during backward.")
              .or_null()
              .fallback_to(nullptr)
              .computed("null: true for stage 3, false otherwise"),
          boolean("load_from_fp32_weights", true,
                  "Take master weights from the checkpoint, not from the 16-bit weights."),
          boolean("elastic_checkpoint", false,
                  "Stages 1 and 2 save optimizer states in the old form without padding, and without hyperparameters. "
                  "Checkpoints load at any number of ranks with and without it."),
          offload_param(),
          offload_optimizer(),
          zenflow(),
          size("sub_group_size", 1000000000, "Elements stepped at one time (stage 3)."),
          boolean("cpu_offload_param", false, "Old name.")
              .or_null()
              .fallback_to(nullptr)
              .deprecated_for("offload_param")
              .forwards_true_as("device", "cpu"),
          boolean("cpu_offload_params", false, "Older name.")
              .or_null()
              .fallback_to(nullptr)
              .deprecated_for("offload_param")
              .forwards_true_as("device", "cpu"),
          boolean("cpu_offload_use_pin_memory", false, "Old name; its value is not carried over.")
              .or_null()
              .fallback_to(nullptr)
              .deprecated_for("offload_param or offload_optimizer")
              .no_effect("offload_param.pin_memory and offload_optimizer.pin_memory decide"),
          boolean("cpu_offload", false, "Old name.")
              .or_null()
              .fallback_to(nullptr)
              .deprecated_for("offload_optimizer")
              .forwards_true_as("device", "cpu"),
      });
  for (Field& f : stage_3_fields()) out.fields.push_back(std::move(f));
  const std::vector<Field> rest = {
      boolean("ignore_unused_parameters", true, "false: a parameter without a gradient is an error."),
      boolean("legacy_stage1", false, "The first implementation of stage 1; there is one only here.")
          .not_built("the legacy stage 1"),
      boolean("round_robin_gradients", false, "Deal gradients to ranks in turn, so that they leave the device evenly.")
          .no_effect("every bucket belongs to all ranks in equal parts"),
      size(
          "zero_hpz_partition_size", 1,
          "Ranks (of one node) that together hold a second copy of the parameters, from which gathers read (hpZ, stage "
          "3); 1 switches it off."),
      boolean("zero_quantized_weights", false, "Parameters are gathered as codes of 8 bits (qwZ, stage 3)."),
      boolean("zero_quantized_nontrainable_weights", false,
              "Frozen parameters rest and are gathered as codes of 8 bits (MixZ++, stage 3)."),
      boolean(
          "zero_quantized_gradients", false,
          "Gradients are reduced as codes: 8 bits for each element inside a host, 4 between hosts (qgZ, stages 1 to "
          "3)."),
      section(
          "zeropp_loco_param",
          "Error feedback of zero_quantized_gradients (LoCo): what codes lose is added to later gradients.",
          {
              share("err_beta", 0.8,
                    "Share of the old error that is kept when a reduction adds what it has lost, times 1 - err_beta."),
              integer("reset_T", 1024, "Steps after which the error starts from zero again.").at_least(1),
          })
          .absent_is_null(),
      integer("mics_shard_size", -1, "Ranks that share one copy of the model: MiCS; -1 switches it off."),
      boolean("mics_hierarchical_params_gather", false,
              "With mics_shard_size: the ranks of a host keep a second copy of the model, as with "
              "zero_hpz_partition_size, and gather from each other."),
      boolean("memory_efficient_linear", true, "A linear layer that keeps less for backward (stage 3)."),
      boolean("pipeline_loading_checkpoint", false,
              "The ranks of a machine load their masters and optimizer states one after the other (stage 3)."),
      boolean("compute_grad_norm", true,
              "false: engine.get_global_grad_norm() returns null. For stages 1 and 2 without gradient clipping."),
      boolean("parameter_alignment", false, "Each parameter begins at a multiple of 16 bytes in its flat buffer.")
          .no_effect("kernels take parameters at any address"),
      boolean("override_module_apply", true, "Module.apply gathers parameters (stage 3)."),
      boolean("log_trace_cache_warnings", false, "Warn when the order of modules changes (stage 3).")
          .no_effect("a changed order costs nothing"),
      boolean("enable_sanity_checks", false,
              "A write into parameters inside `GatheredParameters` without a `modifier_rank` (stage 3) is an error."),
      boolean("save_muon_momentum_buffer_in_memory", false,
              "Keep Muon's momentum in memory where other states are on NVMe. (Elsewhere it is there anyway.)")
          .no_effect("the momentum rests where the other states do"),
      leaf_module(),
  };
  append(out.fields, rest);
  out.ignores_old("grad_hooks", "gradients are reduced from hooks of autograd at every stage");
  return out;
}

DS_CONFIG_CHAPTER(50, kTraining, "ZeRO") {
  Field zero = zero_section("zero_optimization", "Shard optimizer states, gradients and parameters over ranks.");
  zero.bool_sets("stage", 1, 0, "is an old spelling; it stands for {\"stage\": 1} or {\"stage\": 0}.");
  // Ours, not DeepSpeed's, and about training only: the `zero` section of inference does not have it.
  zero.fields.push_back(integer("audit_steps", 0,
                                "For that many first steps gradients, norm and update are recomputed without sharding "
                                "and compared.")
                            .at_least(0)
                            .overridden_by("DS_AUDIT"));
  const auto gib = [](const char* name, const char* doc) { return number(name, nullptr, doc).at_least(0).or_null(); };
  zero.fields.push_back(
      validated("placement", "Masters, gradients and optimizer states rest where there is memory for them.",
                {
                    boolean("auto", false,
                            "On the device, on the host and in files below offload_optimizer.nvme_path, so that a "
                            "step takes the least time at the rates of this machine, which are measured once."),
                    gib("device_gb", "GiB of the device that they may take on each rank; null: none."),
                    gib("host_gb", "GiB of the host, likewise; null: as much as it takes."),
                    gib("nvme_gb", "GiB of the drive, likewise; null: as much as it takes."),
                })
          .absent_is_null());
  c.add(zero);

  c.rule("zero_optimization.overlap_comm is true for stage 3 and false otherwise, unless given.", [](RuleContext& j) {
    if (!j.is_null("zero_optimization.overlap_comm")) return;
    const int64_t stage = j.integer("zero_optimization.stage");
    j.derive("zero_optimization.overlap_comm", stage == 3,
             stage == 0 ? "" : "zero_optimization.stage = " + std::to_string(stage));
  });
  c.whole_rule(
      "offload_optimizer needs ZeRO stage 1, 2 or 3; offload_param has no effect below stage 3.", [](RuleContext& j) {
        const int64_t stage = j.integer("zero_optimization.stage");
        const auto used = [&](const std::string& path) {
          const std::string device = j.text(path + ".device");
          return device == "cpu" || device == "nvme";
        };
        if (used("zero_optimization.offload_optimizer") && stage < 1) {
          j.error({"zero_optimization.offload_optimizer.device", "zero_optimization.stage"},
                  "optimizer offload needs ZeRO stage 1, 2 or 3.",
                  "Set \"zero_optimization.stage\", or the device to \"none\".");
        }
        if (used("zero_optimization.offload_param") && stage != 3) {
          j.warn({"zero_optimization.offload_param.device", "zero_optimization.stage"},
                 "parameter offload has no effect below ZeRO stage 3: every rank keeps all parameters on its device.");
        }
      });
  c.rule("placement.auto needs ZeRO stage 1, 2 or 3, and decides instead of offload_optimizer.device.",
         [](RuleContext& j) {
           const std::string path = "zero_optimization.placement.auto",
                             device = "zero_optimization.offload_optimizer.device";
           if (!j.on(path)) return;
           if (j.integer("zero_optimization.stage") < 1)
             j.error({path, "zero_optimization.stage"}, "placement needs ZeRO stage 1, 2 or 3.",
                     "Set \"zero_optimization.stage\", or leave placement out.");
           if (j.text(device) == "cpu" || j.text(device) == "nvme")
             j.error({path, device}, "both say where states rest.", "Leave one of them out.");
         });
  c.rule("Device nvme needs nvme_path.", [](RuleContext& j) {
    for (const char* where : {"zero_optimization.offload_optimizer", "zero_optimization.offload_param"}) {
      const std::string path = where;
      if (path == "zero_optimization.offload_param" && j.integer("zero_optimization.stage") != 3) continue;
      if (j.text(path + ".device") == "nvme" && j.is_null(path + ".nvme_path")) {
        j.error({path + ".nvme_path", path + ".device"}, "device nvme needs a folder.",
                "Set \"" + path + ".nvme_path\".");
      }
    }
  });
  c.rule("offload_optimizer.ratio below 1 needs stage 3, or a device to which the share goes.", [](RuleContext& j) {
    const std::string section = "zero_optimization.offload_optimizer.", path = section + "ratio";
    if (j.given(path) && j.number(path) < 1.0 && j.integer("zero_optimization.stage") != 3 &&
        j.text(section + "device") == "none") {
      j.error({path, "zero_optimization.stage"}, "a ratio below 1 needs ZeRO stage 3, or a device: there is none.",
              "Set \"" + section + "device\", or leave the ratio out.");
    }
  });
  c.whole_rule(
      "super_offload and zenflow need offload_optimizer with a device, and exclude each other.", [](RuleContext& j) {
        const std::string section = "zero_optimization.offload_optimizer.", device = section + "device";
        const std::string flow = "zero_optimization.zenflow";
        const bool nowhere = j.text(device) != "cpu" && j.text(device) != "nvme";
        const bool speculates = j.on(section + "super_offload"), flows = !j.is_null(flow);
        const char* fix = "Set \"zero_optimization.offload_optimizer.device\" to \"cpu\".";
        if (speculates && nowhere)
          j.error({section + "super_offload", device}, "steps on the host, where nothing rests.", fix);
        if (flows && nowhere) j.error({flow, device}, "updates the rest on the host, where nothing rests.", fix);
        if (flows && j.integer("zero_optimization.audit_steps") > 0)
          j.error({"zero_optimization.audit_steps", flow}, "compares with steps that update everything.",
                  "Leave one of them out.");
        if (speculates && flows)
          j.error({section + "super_offload", flow}, "both say when the host steps.", "Leave one of them out.");
      });
  c.rule(
      "zenflow.select_interval below zenflow.update_interval counts as zenflow.update_interval.", [](RuleContext& j) {
        const std::string flow = "zero_optimization.zenflow.";
        if (j.is_null("zero_optimization.zenflow") || !j.text(flow + "select_interval").empty() ||
            !j.text(flow + "update_interval").empty())
          return;
        const std::string select = j.text(flow + "select_strategy");
        const bool epochs = select != "step" && !j.is_null(flow + "steps_per_epoch");
        if (select == "epoch" && !epochs) return;  // how long an epoch is, is known later
        const int64_t steps = j.integer(flow + "select_interval") * (epochs ? j.integer(flow + "steps_per_epoch") : 1);
        const int64_t update = j.integer(flow + "update_interval");
        if (steps < update)
          j.warn({flow + "select_interval", flow + "update_interval"},
                 "columns are chosen anew every " + std::to_string(update) + " steps, not every " +
                     std::to_string(steps) + ": gradients of the rest are added up over " + std::to_string(update) +
                     " steps, and a choice waits for the end of such an interval.");
      });
  c.rule("compute_grad_norm false needs ZeRO stage 1 or 2 without gradient_clipping.", [](RuleContext& j) {
    const std::string path = "zero_optimization.compute_grad_norm";
    if (j.on(path)) return;
    const int64_t stage = j.integer("zero_optimization.stage");
    if (stage != 1 && stage != 2)
      j.error({path, "zero_optimization.stage"}, "false is supported only with ZeRO Stage 1 or 2.", "Leave it out.");
    if (j.number("gradient_clipping") > 0)
      j.error({path, "gradient_clipping"}, "clipping needs the norm.", "Set \"gradient_clipping\" to 0.");
  });
  c.rule("pipeline_loading_checkpoint is for stage 3.", [](RuleContext& j) {
    if (j.integer("zero_optimization.stage") != 3 && j.on("zero_optimization.pipeline_loading_checkpoint")) {
      j.warn({"zero_optimization.pipeline_loading_checkpoint", "zero_optimization.stage"},
             "is for stage 3: load_checkpoint refuses to load optimizer states of stages 1 and 2 with it.");
    }
  });
  c.rule("elastic_checkpoint has no effect with stage 3.", [](RuleContext& j) {
    if (j.integer("zero_optimization.stage") == 3 && j.on("zero_optimization.elastic_checkpoint")) {
      j.warn({"zero_optimization.elastic_checkpoint"},
             "elastic checkpointing is deprecated, and has no effect with stage 3.");
    }
  });
}

}  // namespace ds::config
