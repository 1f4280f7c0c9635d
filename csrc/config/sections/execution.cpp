// The sections hybrid_engine and compile.
#include "config/schema.h"

namespace ds::config {

DS_CONFIG_CHAPTER(97, kTraining, "Compilation and generation") {
  auto hybrid = validated("hybrid_engine", "Train and generate with one model: RLHF.",
                          {
                              boolean("enabled", false, "Switch it on."),
                              integer("max_out_tokens", 512, "Most tokens of a sequence.").above(0),
                              integer("inference_tp_size", 1, "Tensor-parallel ranks while generating.").at_least(1),
                              boolean("release_inference_cache", false, "Free its cache after generating."),
                              boolean("pin_parameters", true, "Keep gathered parameters in place while generating."),
                              integer("tp_gather_partition_size", 8, "Layers gathered at one time.").at_least(1),
                              boolean("enable_cuda_graph", false, "Capture generation in a CUDA graph."),
                          });
  c.add(hybrid.not_built("the hybrid engine"));
  auto compile =
      validated("compile", "DeepCompile: let the compiler place ZeRO's communication.",
                {
                    boolean("deepcompile", false, "Switch it on."),
                    boolean("free_activation", false, "Free activations early."),
                    integer("free_activation_threshold", 10485760,
                            "free_activation frees only activations of at least this many bytes.")
                        .at_least(0),
                    boolean("offload_activation", false, "Offload activations."),
                    boolean("offload_activation_pin_memory", true, "Offload activations to page-locked memory."),
                    boolean("offload_opt_states", false, "Offload optimizer states."),
                    boolean("double_buffer", true, "Gather into two buffers in turn."),
                    boolean("symmetric_memory", false, "Use torch's symmetric memory."),
                    boolean("debug_log", false, "Print the graphs."),
                    boolean("offload_parameters", false, "Offload parameters."),
                    boolean("sync_before_reduce", false, "Wait for the device before reducing."),
                    boolean("sync_after_reduce", false, "Wait for the device after reducing."),
                    boolean("sync_before_allgather", false, "Wait for the device before gathering."),
                    boolean("sync_after_allgather", false, "Wait for the device after gathering."),
                    boolean("keep_int_input_tensors", true, "Do not free integer inputs."),
                    boolean("keep_all_input_tensors", false, "Do not free any input."),
                    list("passes", nullptr, "Passes to run; null chooses them by ZeRO stage.")
                        .items_one_of({"z1", "z3", "autosp", "autotp"}),
                });
  compile.ignores_old("backend", "engine.compile(backend=...) names the backend")
      .ignores_old("disable", "a model is compiled where the script calls engine.compile()")
      .ignores_old("enabled", "a model is compiled where the script calls engine.compile()")
      .ignores_old("kwargs", "engine.compile(compile_kwargs=...) takes them");
  c.add(compile.not_built("DeepCompile", {"deepcompile"}));
  c.rule("compile: at most one of offload_activation, offload_opt_states and offload_parameters is on.",
         [](RuleContext& j) {
           const std::vector<std::string> kinds = {"compile.offload_activation", "compile.offload_opt_states",
                                                   "compile.offload_parameters"};
           for (size_t a = 0; a < kinds.size(); ++a) {
             for (size_t b = a + 1; b < kinds.size(); ++b) {
               if (j.on(kinds[a]) && j.on(kinds[b]))
                 j.error({kinds[a], kinds[b]}, "the two exclude each other.", "Switch one of them off.");
             }
           }
         });
}

}  // namespace ds::config
