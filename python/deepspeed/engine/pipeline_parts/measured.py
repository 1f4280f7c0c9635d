"""Measured times of the batches of a pipeline, beside its plan."""

import time

import torch

from deepspeed import comm as dist
from deepspeed.engine.members import Part, pipeline_parts
from deepspeed.log import log_dist

MEASURED_AFTER = 10  # batches; the first two, which warm up and wait for the plan, are not among those measured


@pipeline_parts.add("_measured")
class Measured(Part):
    """A part of a pipeline's engine. ``found`` is None until enough batches are measured."""

    def begin(self):
        """Measures from the beginning."""
        self.found, self._told, self._since = None, False, None
        self.measures, self._busy, self._seconds, self._span = False, 0.0, 0.0, 0.0
        self._last_pass = 0.0  # when the last one ended

    def add_pass(self, begin):
        """A pass that began then ends now."""
        self._last_pass = time.perf_counter()
        self._busy += self._last_pass - begin

    def end_batch(self, began, seconds):
        """At the first batch the plan, after ten what was measured: of the bubble, as the plan does, from the start of
        a batch to the end of the last pass of all stages, without reductions and update."""
        engine, channel = self.engine, self.engine._links.channel
        if self.found is not None:
            return
        if not self._told:
            self._tell_plan()
            return
        if self._since is None:  # in this batch the others have waited for the one that has printed
            self._since, self.measures = (engine.global_steps, channel.sent[1]), True
            return
        self._seconds += seconds
        self._span += self._last_pass - began
        batches = engine.global_steps - self._since[0]
        if batches < MEASURED_AFTER - 2:
            return
        busy, longest = (
            torch.tensor(one, dtype=torch.float32, device=engine.device)
            for one in ([self._busy], [self._seconds, self._span])
        )
        if engine.is_pipe_parallel:
            engine._links.stages.run("all_reduce", output=busy, op="sum").wait()
            engine._links.stages.run("all_reduce", output=longest, op="max").wait()
        seconds, span = (max(one, 1e-9) for one in longest.tolist())
        # The host only asks a device for passes: how long they take is not known here.
        bubble = 1 - busy.item() / (span * engine.num_stages) if engine.device.type == "cpu" else None
        sent = (channel.sent[1] - self._since[1]) // batches
        self.found = {"seconds": seconds / batches, "bubble": bubble, "bytes_sent": sent}
        log_dist(
            f"pipeline, measured over {batches} batches: {self.found['seconds'] * 1e3:.2f} ms a batch"
            + ("" if bubble is None else f", bubble {bubble:.1%}")
            + f", {sent / 2**20:.2f} MB sent by stage {engine.stage_id}",
            ranks=[0],
        )

    def _tell_plan(self):
        engine, plans, self._told = self.engine, self.engine._plans, True
        sample, labels = [plans.sample], [plans.label_sample]
        engine._links.from_first(sample)
        if engine.is_pipe_parallel:
            source = engine.grid.stage_to_global(engine._last_stage)
            dist.broadcast_object_list(labels, source, group=engine.grid.get_pipe_parallel_group())
        plans.sample, plans.label_sample = sample[0], labels[0]
        engine._planning.inputs = None if labels[0] is None else ((sample[0], labels[0]), {})
        if engine.global_rank != 0 or engine.is_model_parallel:  # sliced layers would wait for the other slices
            return
        try:
            log_dist(str(engine.pipe_plan()), ranks=[0])
        except Exception as error:
            log_dist(f"the plan of the pipeline is not known: {error}", ranks=[0])
