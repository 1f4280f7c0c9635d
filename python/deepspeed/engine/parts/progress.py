"""Reports while the engine trains: a line every ``steps_per_print`` steps, and timers."""

import contextlib
import functools
import os

import torch

from deepspeed.checkpoint.write.ranks import Ranks
from deepspeed.engine.members import engine_parts, member
from deepspeed.engine.memory import see_memory_usage
from deepspeed.log import log_dist
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.profiling.phases import PhaseTimes
from deepspeed.utils.timer import (
    BACKWARD_GLOBAL_TIMER,
    BACKWARD_INNER_GLOBAL_TIMER,
    BACKWARD_INNER_MICRO_TIMER,
    BACKWARD_MICRO_TIMER,
    BACKWARD_REDUCE_GLOBAL_TIMER,
    BACKWARD_REDUCE_MICRO_TIMER,
    FORWARD_GLOBAL_TIMER,
    FORWARD_MICRO_TIMER,
    STEP_GLOBAL_TIMER,
    STEP_MICRO_TIMER,
    NoopTimer,
    SynchronizedWallClockTimer,
    ThroughputTimer,
)

# Timers of each phase of a micro-step: of this one alone, and of all up to the boundary.
_TIMERS = {
    "forward": (FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER),
    "backward": (BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER),
    "step": (STEP_MICRO_TIMER, STEP_GLOBAL_TIMER),
}
# The same of what backward consists of: waiting for reductions, and the rest.
_REDUCE = BACKWARD_REDUCE_MICRO_TIMER, BACKWARD_REDUCE_GLOBAL_TIMER
_INNER = BACKWARD_INNER_MICRO_TIMER, BACKWARD_INNER_GLOBAL_TIMER
_ALL = [_TIMERS["forward"], _TIMERS["backward"], _INNER, _REDUCE, _TIMERS["step"]]

# Events of a step, by the timer that they tell of.
_ELAPSED = {
    FORWARD_GLOBAL_TIMER: "forward",
    BACKWARD_GLOBAL_TIMER: "backward",
    BACKWARD_INNER_GLOBAL_TIMER: "backward_inner",
    BACKWARD_REDUCE_GLOBAL_TIMER: "backward_allreduce",
    STEP_GLOBAL_TIMER: "step",
}


@engine_parts.add("progress")
class Progress:
    """Timers of one engine, its memory, and what its monitor gets; they cost nothing unless ``wall_clock_breakdown``,
    ``memory_breakdown`` or a monitor asks for them."""

    def __init__(self, engine):
        self.engine = engine
        self._loss = None  # of the step under way, where the engine has made its backward
        self._samples = 0  # that the engine had seen when it last made a step or loaded a checkpoint
        self.breakdown = engine.wall_clock_breakdown()
        self.memory = engine.memory_breakdown()
        every = engine.steps_per_print()
        self.every = int(every) if every and every != float("inf") else None
        self._marks = {}  # of the phases that have begun
        self._last_times = {}  # of the last step, see get_wall_clock_timers
        self.timers = SynchronizedWallClockTimer() if self.breakdown else NoopTimer()
        self.throughput = ThroughputTimer(
            engine._config.timers_config,
            batch_size=engine.train_batch_size(),
            steps_per_output=every,
            monitor_memory=False,
            logging_fn=functools.partial(log_dist, ranks=[0]),
        )

    def time_samples(self, trains):
        """Before a forward, or a batch of a pipeline. The time of a step begins where the step before has ended, so
        reading the data is a part of it. Evaluation and checkpoints in between are not: after them it begins anew."""
        if not trains:
            self.throughput.drop()
        elif not self.throughput.started:
            self.throughput.start(reading=False)

    def before_save(self):
        self.throughput.drop()

    @member
    def get_wall_clock_timers(self):
        """Milliseconds of the last step by the name of their timer (``fwd``, ``bwd``, ``bwd_inner``, ``bwd_allreduce``,
        ``step``, and of its last micro-step ``fwd_microstep`` and so on); {} without ``wall_clock_breakdown``."""
        return dict(self._last_times)

    @property
    def due(self):
        """Whether reports tell of the step that was made last: one of each ``steps_per_print``."""
        return self.every is not None and self.engine.global_steps % self.every == 0

    def _see_memory(self, where):
        if self.memory:
            see_memory_usage(f"Engine {where}", force=True)

    def begin(self, phase):
        self._see_memory(f"before {phase}")
        for name in _TIMERS[phase] if self.breakdown else ():
            self.timers(name).start()
        if phase == "forward" and not torch.is_grad_enabled():
            return
        phases = self.engine._step_log.phases
        if self.breakdown and phase == "backward":
            self._backward = PhaseTimes(phases.clock)
        self._marks[phase] = phases.enter("optimizer" if phase == "step" else phase)

    def _stop(self, phase):
        entered = phase in self._marks  # else its begin has failed, or it has ended
        if entered:
            self.engine._step_log.phases.leave(self._marks.pop(phase))
        for timer in map(self.timers, _TIMERS[phase]) if self.breakdown else ():
            if timer.started_:
                timer.stop()
        if self.breakdown and phase == "backward" and entered:
            reduced = self._backward.take()[2] * 1e3
            for whole, reduce, inner in zip(_TIMERS["backward"], _REDUCE, _INNER):
                self.timers(reduce).add(reduced)
                self.timers(inner).add(self.timers(whole).last() - reduced)

    def end(self, phase):
        """After a phase, also one that has raised."""
        self._stop(phase)
        self._see_memory(f"after {phase}")

    def open_monitor(self):
        """The monitors of the configuration. One that cannot be opened is an error on all ranks."""
        engine, config = self.engine, self.engine._config.monitor_config
        if not config.enabled:
            return MonitorMaster(config)
        for kind in ("csv_monitor", "tensorboard"):
            folder = engine._outputs.paths.get(f"{kind}.output_path")
            if folder is not None:  # another name than that of the configuration where another engine writes there
                section = getattr(config, kind).model_copy(update={"job_name": os.path.basename(folder)})
                config = config.model_copy(update={kind: section})
        ranks = Ranks(engine.parallel, False)
        return ranks.together(lambda: MonitorMaster(config), "the metrics of this run cannot be written")

    @contextlib.contextmanager
    def inside(self, phase):
        try:
            self.begin(phase)
            yield
        finally:
            self.end(phase)

    def _monitored(self):
        return self.engine.monitor.enabled and self.engine.global_rank == 0

    def stop(self):
        if self._monitored():
            self.engine.monitor.flush()

    def after_load(self):
        """A checkpoint with counters takes the run to another number of samples; weights alone do not."""
        self.throughput.drop()
        if self._samples != self.engine.global_samples:
            self._samples = self.engine.global_samples
            if self._monitored():
                self.engine.monitor.resume(self._samples)

    def before_step(self):
        self._loss = self.engine.losses

    def before_micro_step(self, boundary):
        self.begin("step")

    def failed_step(self):
        self._stop("step")

    def after_micro_step(self, boundary):
        engine = self.engine
        if boundary:
            self.throughput.batch_size = engine._data.last_samples
        self.throughput.stop(global_step=boundary, report_speed=boundary)
        self.throughput.start()
        self._stop("step")
        if boundary:
            before, self._samples = self._samples, engine.global_samples
            if self._monitored():
                figures = self._figures(self._samples - before)
                engine.monitor.write_events([(name, value, self._samples) for name, value in figures])
            self._loss = None
        if self.breakdown:
            if boundary:
                known = [name for pair in _ALL for name in pair if self.timers.has_timer(name)]
                self._last_times = {name: self.timers(name).elapsed(reset=False) for name in known}
            self.timers.log([micro for micro, _ in _ALL], memory_breakdown=engine.memory_breakdown())
            if boundary:
                steps = engine._window.last_micro_batches
                self.timers.log([whole for _, whole in _ALL], normalizer=steps)
        self._see_memory("after step")
        if boundary and self.due:
            engine._report_progress(engine.global_steps)

    @member
    def _report_progress(self, step):
        """Logs a line about the step ``step`` on rank 0. Scripts replace it."""
        engine = self.engine
        text = f"step={step}, skipped={engine.skipped_steps}, lr={engine.get_lr()}, mom={engine.get_mom()}"
        log_dist(text, ranks=[0])

    def _figures(self, samples):
        """Yields (event, value) of the last step on rank 0. ``samples``: trained so far."""
        engine = self.engine
        if self._loss is not None:
            yield "Train/Samples/train_loss", self._loss.item()
        yield "Train/Samples/lr", engine.get_lr()[0]
        if engine.fp16_enabled() and hasattr(engine.optimizer, "cur_scale"):
            yield "Train/Samples/loss_scale", engine.optimizer.cur_scale
        norm, seconds = engine.get_global_grad_norm(), self.throughput.step_seconds
        if norm is not None:
            yield "Train/Samples/grad_norm", float(norm)
        if seconds:
            yield "Train/Samples/samples_per_sec", samples / seconds
        for timer, name in _ELAPSED.items() if self.breakdown else ():
            if self.timers.has_timer(timer):
                yield f"Train/Samples/elapsed_time_ms_{name}", self.timers(timer).elapsed(reset=False)
        yield from engine._offloading.figures()
