"""Timers: by name on the device's clock, and for throughput.

Times are in milliseconds unless a name says otherwise. A timer that measures the device uses its events, so that
starting and stopping does not stall it; where the accelerator asks for host timers, the device is synchronised instead.
"""

import time

from deepspeed.accelerator import get_accelerator
from deepspeed.log import log_dist, logger

FORWARD_MICRO_TIMER = "fwd_microstep"
FORWARD_GLOBAL_TIMER = "fwd"
BACKWARD_MICRO_TIMER = "bwd_microstep"
BACKWARD_GLOBAL_TIMER = "bwd"
BACKWARD_INNER_MICRO_TIMER = "bwd_inner_microstep"
BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER = "bwd_allreduce_microstep"
BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce"
STEP_MICRO_TIMER = "step_microstep"
STEP_GLOBAL_TIMER = "step"
TRAIN_BATCH_TIMER = "train_batch"
BATCH_INPUT_TIMER = "batch_input"
PIPE_SEND_OUTPUT_TIMER = "pipe_send_output"
PIPE_SEND_GRAD_TIMER = "pipe_send_grad"
PIPE_RECV_INPUT_TIMER = "pipe_recv_input"
PIPE_RECV_GRAD_TIMER = "pipe_recv_grad"
TIME_EPSILON = 1e-6

GIB = 1024**3


def trim_mean(data, trim_percent):
    """Mean of the numbers without the `trim_percent` (0 to 1) smallest and as many largest ones; their median where
    nothing would be left, 0 for no data."""
    assert 0.0 <= trim_percent <= 1.0, f"trim_percent must be between 0 and 1, got {trim_percent}"
    ordered = sorted(data)
    count = len(ordered)
    if count == 0:
        return 0
    cut = min(int(round(count * trim_percent)), (count - 1) // 2)
    kept = ordered[cut : count - cut]
    return sum(kept) / len(kept)


def device_time():
    """Seconds of the host's clock, when the device has done what it was asked for."""
    get_accelerator().synchronize()
    return time.perf_counter()


def _now(on_host):
    """This moment: on the host's clock with the device idle, or as an event of the device's current stream."""
    if on_host:
        return device_time()
    event = get_accelerator().Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(begin, end):
    """The time between two moments of ``_now``."""
    if isinstance(end, float):
        return (end - begin) * 1000.0
    end.synchronize()
    return begin.elapsed_time(end)


class SynchronizedWallClockTimer:
    """Named timers: ``timers("fwd").start()``, ``timers("fwd").stop()``, ``timers.log(["fwd"])``."""

    class Timer:
        """One timer: the sum of what was measured since the last reset, and the recorded values for a mean."""

        def __init__(self, name):
            self.name_ = name
            self._on_host = get_accelerator().use_host_timers()
            self.reset()

        def start(self):
            assert not self.started_, f"timer {self.name_} has already been started"
            self._begin = _now(self._on_host)
            self.started_ = True

        def stop(self, reset=False, record=False):
            """Ends the running stretch. reset: forget earlier ones; record: keep its length for mean()."""
            assert self.started_, f"timer {self.name_} is not started"
            stretch = self._begin, _now(self._on_host)
            if reset:
                self._ended = []
            self._ended.append(stretch)
            if record:
                self._records.append(stretch)
            self.started_ = False

        def add(self, milliseconds):
            """A stretch of this length, which was measured elsewhere."""
            self._ended.append((0.0, milliseconds / 1000.0))

        def last(self):
            """Milliseconds of the last stretch; 0 where there is none."""
            return _milliseconds(*self._ended[-1]) if self._ended else 0.0

        def reset(self):
            """Forgets everything, a running stretch too."""
            self.started_ = False
            self._ended, self._records = [], []  # stretches: pairs of moments

        def elapsed(self, reset=True):
            """Milliseconds measured since the last reset, a running stretch included; it goes on running."""
            running = self.started_
            if running:
                self.stop()
            total = sum(_milliseconds(*stretch) for stretch in self._ended)
            if reset:
                self._ended = []
            if running:
                self.start()
            return total

        def mean(self):
            """Mean milliseconds of the recorded stretches without the outer tenth on either side."""
            return trim_mean([_milliseconds(*stretch) for stretch in self._records], 0.1)

    def __init__(self):
        self.timers = {}

    def get_timers(self):
        """The timers by name."""
        return self.timers

    def __call__(self, name):
        if name not in self.timers:
            self.timers[name] = self.Timer(name)
        return self.timers[name]

    def has_timer(self, name):
        return name in self.timers

    @staticmethod
    def memory_usage():
        """Memory of the accelerator in words, in GiB."""
        device = get_accelerator()
        values = {
            "mem_allocated": device.memory_allocated(),
            "max_mem_allocated": device.max_memory_allocated(),
            "cache_allocated": device.memory_cached(),
            "max_cache_allocated": device.max_memory_cached(),
        }
        return " | " + " | ".join(f"{name}: {bytes_ / GIB:.4f} GB" for name, bytes_ in values.items())

    def log(self, names, normalizer=1.0, reset=True, memory_breakdown=False, ranks=None):
        """Logs ``time (ms) | name: value | ...`` for the names there are timers for, each divided by `normalizer`."""
        assert normalizer > 0.0, f"normalizer must be above 0, got {normalizer}"
        parts = [
            f" | {name}: {self.timers[name].elapsed(reset=reset) / normalizer:.2f}"
            for name in names
            if name in self.timers
        ]
        text = "time (ms)" + "".join(parts)
        if memory_breakdown:
            text += self.memory_usage()
        log_dist(text, ranks=ranks or [0])

    def get_mean(self, names, normalizer=1.0, reset=True):
        """{name: trimmed mean of its recorded milliseconds / normalizer} for the names there are timers for."""
        assert normalizer > 0.0, f"normalizer must be above 0, got {normalizer}"
        means = {}
        for name in names:
            if name in self.timers:
                means[name] = self.timers[name].mean() / normalizer
                if reset:
                    self.timers[name].reset()
        return means


class NoopTimer:
    """Stands in for SynchronizedWallClockTimer where nothing shall be measured."""

    class Timer:
        def start(self, **kwargs):
            pass

        def elapsed(self, **kwargs):
            return 0

        reset = stop = start
        mean = elapsed

    timer = Timer()

    def __call__(self, name):
        return self.timer

    def get_timers(self):
        return {}

    def has_timer(self, name):
        return True

    def log(self, names, normalizer=1.0, reset=True, memory_breakdown=False, ranks=None):
        pass

    def get_mean(self, names, normalizer=1.0, reset=True):
        return {}


class ThroughputTimer:
    """Samples per second, from the start of reading a batch to the end of the step.

    config:           object with ``enabled`` and ``synchronized`` (wait for the device at both ends), or None: both on.
    batch_size:       samples per step over all ranks. It may change; a step counts with the number at its end.
    start_step:       steps that do not count: the first ones pay for warming up.
    steps_per_output: number of steps between two lines in the log; None: no lines.
    monitor_memory:   host memory in that line too.

    ``initialized``: start() has been called; ``started``: between start() and stop(); ``start_time``: ``time.time()``
    of the last start that counts, ``end_time`` that of the last stop that does, 0 before it. ``step_seconds``: of
    the last step, None before one that counts.
    """

    def __init__(
        self, config=None, batch_size=1, start_step=2, steps_per_output=None, monitor_memory=False, logging_fn=None
    ):
        self.enabled = getattr(config, "enabled", True)
        self.synchronized = getattr(config, "synchronized", True)
        self.batch_size = max(1, batch_size or 1)
        self.start_step, self.steps_per_output = start_step, steps_per_output
        self.monitor_memory = monitor_memory
        self.logging = logging_fn or logger.info
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.initialized = self.started = False
        self.start_time = self.end_time = 0
        self.total_elapsed_time = 0.0  # seconds, of the counted steps
        self.step_elapsed_time = 0.0  # seconds since the last report
        self.step_seconds = None
        self._seconds = 0.0  # of the step under way
        self._parts, self._whole = 0, True  # of it: micro-steps that have ended; and whether all its time is known
        self._any_whole = False  # whether there was such a step; until then the others count
        self._counted_steps = 0
        self._samples = self._samples_since_report = 0  # of the counted steps
        self._start_s = None

    def update_epoch_count(self):
        """A new epoch begins: micro-steps are counted from 0 again."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def _now(self):
        return device_time() if self.synchronized else time.perf_counter()

    def start(self, reading=True):
        """Before a batch is read; called twice without a stop, the later call counts. Without ``reading`` the batch is
        there already: where other steps are measured whole, this one does not count, unless its time is known
        already."""
        self._whole = self._whole or (reading and self._parts == 0)
        if self.enabled:
            self.initialized = self.started = True
        if self.enabled and self.global_step_count >= self.start_step:
            self._start_s = self._now()
            self.start_time = time.time()

    def drop(self):
        """The time since the last start does not count, since it was spent on something else than training."""
        self.started, self._start_s, self._whole = False, None, False

    def stop(self, global_step=False, report_speed=True):
        """After a micro-step; global_step: it was the last of its step, so the step is complete. Nothing without
        start()."""
        if not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        measured = self._start_s is not None
        if measured:
            duration = self._now() - self._start_s
            self._start_s, self.end_time = None, time.time()
            self._seconds += duration
        self._parts += 1
        self.global_step_count += global_step
        if not global_step:
            return
        seconds, whole = self._seconds, measured and self._whole
        self._seconds, self._parts, self._whole = 0.0, 0, True
        if whole and not self._any_whole:
            self._any_whole, self._counted_steps = True, 0
            self.total_elapsed_time = self.step_elapsed_time = 0.0
            self._samples = self._samples_since_report = 0
        counts = whole or (measured and not self._any_whole)
        self.step_seconds = seconds if counts else None
        if counts:
            self.total_elapsed_time += seconds
            self.step_elapsed_time += seconds
            self._counted_steps += 1
            self._samples += self.batch_size
            self._samples_since_report += self.batch_size
        if self._counted_steps and self.steps_per_output and self.global_step_count % self.steps_per_output == 0:
            if report_speed:
                self._report()
            self.step_elapsed_time = 0.0
            self._samples_since_report = 0

    def _report(self):
        now = self._samples_since_report / (self.step_elapsed_time + TIME_EPSILON)
        device = get_accelerator()
        text = (
            f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
            f"RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, CurrSamplesPerSec={now}, "
            f"MemAllocated={round(device.memory_allocated() / GIB, 2)}GB, "
            f"MaxMemAllocated={round(device.max_memory_allocated() / GIB, 2)}GB"
        )
        if self.monitor_memory:
            free, total = device.available_memory() / GIB, device.total_memory() / GIB
            text += f", MemoryFree={free:.2f}GB of {total:.2f}GB"
        self.logging(text)

    def avg_samples_per_sec(self):
        """Samples per second over all counted steps; -inf before the first one."""
        if self._counted_steps == 0:
            return float("-inf")
        return self._samples / (self.total_elapsed_time + TIME_EPSILON)
