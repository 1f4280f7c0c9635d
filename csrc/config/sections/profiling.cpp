// The sections flops_profiler, step_log, trace, report and timers.
#include "config/schema.h"

namespace ds::config {

DS_CONFIG_CHAPTER(60, kTraining, "Profiling") {
  c.add(section("flops_profiler", "Count floating-point operations of one step, per module.",
                {
                    boolean("enabled", false, "Switch it on."),
                    number("recompute_fwd_factor", 0.0,
                           "Forward passes that activation checkpointing adds; 1.0 when all is recomputed.")
                        .at_least(0),
                    integer("profile_step", 1, "The step to profile.").at_least(0),
                    integer("module_depth", -1, "Depth of the aggregated table; -1 is the deepest.").at_least(-1),
                    integer("top_modules", 1, "Modules shown per depth.").at_least(1),
                    boolean("detailed", true, "Print every module."),
                    text("output_file", nullptr, "File to write; null prints."),
                })
            .ignores_private());
  c.add(validated(
      "comms_logger", "Record every collective: size, time, bandwidth.",
      {
          boolean("enabled", false, "Switch it on."),
          boolean("prof_all", true, "Record all operations."),
          list("prof_ops", std::vector<std::string>{}, "Names of operations to record when prof_all is false.")
              .items(kText),
          boolean("verbose", false, "Print each operation when it is done."),
          boolean("debug", false, "Record the caller, too."),
      }));
  c.add(validated("step_log", "Log of the time that the parts of each step took; engine.step_log() returns it.",
                  {
                      boolean("enabled", true, "Switch it off."),
                      text("file", nullptr, "File of rank 0 that gets a line of JSON for each step; null writes none."),
                      number("peak_tflops", nullptr,
                             "Most TFLOPS of a device, for mfu; null measures a matrix product, once on each machine.")
                          .above(0),
                  }));
  c.add(validated("trace", "Record some steps of all ranks, for https://ui.perfetto.dev.",
                  {
                      integer("start_step", nullptr, "The first step that is recorded; null records none.").at_least(1),
                      integer("steps", 1, "The number of steps.").at_least(1),
                      text("path", "trace.json", "The file, which rank 0 writes."),
                  }));
  c.add(section("report", "A page of charts about the run, made from the step log when the run ends.",
                {
                    text("path", nullptr, "HTML file, which rank 0 writes; null writes none."),
                }));
  c.rule("report.path needs step_log.file, whose lines the page is made from.", [](RuleContext& j) {
    if (j.is_null("report.path") || (j.on("step_log.enabled") && !j.is_null("step_log.file"))) return;
    j.error({"report.path", "step_log.file"}, "report.path is set, and no step log is written to make the page from.",
            "Set step_log.file to a file, with step_log.enabled true, or leave report.path out.");
  });
  c.add(section("timers", "Timers that are always there.",
                {
                    validated("throughput", "Samples per second in the progress line.",
                              {
                                  boolean("enabled", true, "Switch it off to save its synchronisation."),
                                  boolean("synchronized", true, "Measure the time of the device, not that of the host."),
                              }),
                }));
}

}  // namespace ds::config
