// The section postmortem.
#include "config/schema.h"

namespace ds::config {

DS_CONFIG_CHAPTER(62, kTraining, "Post-mortem") {
  c.add(validated(
      "postmortem", "Save a step that fails, so that ds_postmortem can run it again and name the cause.",
      {
          list("on", std::vector<std::string>{}, "Failures that are saved; an empty list switches it off.")
              .items_one_of({"nonfinite", "spike", "exception", "hang"}),
          text("dir", "postmortem", "Folder of the bundles, one for each failed step."),
          integer("keep", 3, "The newest bundles that stay.").at_least(1),
          integer("max_bytes", nullptr,
                  "Most bytes of the file of a rank: a larger one is saved without weights and states, or not at all.")
              .at_least(1),
          number("spike_factor", 10.0, "A loss above this times the median of the last losses is a spike.").above(1),
      }));
}

}  // namespace ds::config
