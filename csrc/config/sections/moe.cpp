// Ours, not DeepSpeed's: what layers of deepspeed.moe do beyond their arguments.
#include "config/schema.h"

namespace ds::config {

DS_CONFIG_CHAPTER(96, kTraining, "Mixture of experts") {
  c.add(section(
      "moe", "Layers of deepspeed.moe; their sizes are arguments of the layers.",
      {
          number("aux_loss_coeff", nullptr,
                 "Factor on the auxiliary losses that the stages of a PipelineModule add to the loss, because their "
                 "layers cannot hand them on; null: 0.01. Other models add them in their forward.")
              .at_least(0)
              .or_null(),
          integer("overlap_chunks", 1,
                  "Number of parts into which a rank cuts its experts, so that rows of one part travel while another "
                  "part computes; drop_tokens=False. The result has the same bits.")
              .at_least(1),
          integer("idle_steps", 100,
                  "The log names an expert that no token has chosen for this many steps; 0: it names none.")
              .at_least(0),
          number("bias_update_rate", 0.01,
                 "With balance=\"bias\": distance that the bias of an expert moves in a step.")
              .at_least(0),
      }));
}

}  // namespace ds::config
