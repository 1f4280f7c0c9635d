// The sections of monitors: TensorBoard, W&B, Comet, CSV files.
#include "config/schema.h"

namespace ds::config {

DS_CONFIG_CHAPTER(65, kTraining, "Monitors") {
  c.add(validated("tensorboard", "Write metrics for TensorBoard.",
                  {
                      boolean("enabled", false, "Switch it on."),
                      text("output_path", "", "Folder; \"\" is the current one."),
                      text("job_name", "DeepSpeedJobName", "Folder below it."),
                  }));
  c.add(validated("wandb", "Send metrics to Weights & Biases.",
                  {
                      boolean("enabled", false, "Switch it on."),
                      text("group", nullptr, "Group of the run."),
                      text("team", nullptr, "Team that owns the run."),
                      text("project", "deepspeed", "Project of the run."),
                  }));
  c.add(validated("csv_monitor", "Write metrics to CSV files.",
                  {
                      boolean("enabled", false, "Switch it on."),
                      text("output_path", "", "Folder; \"\" is the current one."),
                      text("job_name", "DeepSpeedJobName", "Folder below it."),
                  }));
  c.add(validated(
      "comet", "Send metrics to Comet.",
      {
          boolean("enabled", false, "Switch it on."),
          integer("samples_log_interval", 100, "Samples between reports.").above(0),
          text("project", nullptr, "Project of the experiment."),
          text("workspace", nullptr, "Workspace of the project."),
          text("api_key", nullptr, "Key; better kept in COMET_API_KEY. Logs and files show \"***\".").secret(),
          text("experiment_name", nullptr, "Name of the experiment."),
          text("experiment_key", nullptr, "Key of an experiment to go on with."),
          boolean("online", false, "Send while running; null leaves it to Comet.").or_null().fallback_to(nullptr),
          text("mode", nullptr, "Go on with an experiment or make one.").one_of({"get", "create", "get_or_create"}),
      }));
  c.add(table("monitors", EmptyTable{},
              "Monitors of other packages: the name of an entry point in the group deepspeed.monitors, and an object "
              "with its keys. The class gets them as attributes; enabled is true unless they say otherwise."));
}

}  // namespace ds::config
