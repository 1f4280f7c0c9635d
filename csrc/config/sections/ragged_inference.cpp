// The configuration of inference on ragged batches.
#include "config/schema.h"

namespace ds::config {

namespace {

Field positive(const char* name, int64_t fallback, const char* doc) { return integer(name, fallback, doc).above(0); }

}  // namespace

DS_CONFIG_CHAPTER(10, kRaggedInference, "Keys of RaggedInferenceEngineConfig") {
  auto tp = validated("tp", "Split layers over ranks.", {integer("tp_size", 1, "Ranks.").at_least(1)});
  c.add(tp.alias("tensor_parallel"));
  auto manager =
      validated("manager", "Sequences and their cache.",
                {
                    positive("max_tracked_sequences", 2048, "Most sequences that are known at one time."),
                    positive("max_ragged_batch_size", 768, "Most tokens of a forward."),
                    positive("max_ragged_sequence_count", 512, "Most sequences of a forward."),
                    positive("max_context", 8192, "Most tokens of a sequence."),
                    validated("memory_config", "Memory of the key-value cache.",
                              {
                                  text("mode", "reserve", "reserve: leave size bytes free; allocate: take size bytes.")
                                      .one_of({"reserve", "allocate"}),
                                  positive("size", 1000000000, "Bytes."),
                              }),
                    boolean("offload", false, "Move the cache of waiting sequences to the host."),
                });
  c.add(manager.alias("state_manager"));
  c.add(validated("quantization", "Quantized weights.",
                  {
                      text("quantization_mode", nullptr, "Format.").one_of({"wf6af16"}),
                  }));
}

}  // namespace ds::config
