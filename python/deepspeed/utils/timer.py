"""Timers: by name on the device's clock, and for throughput.

Times are in milliseconds unless a name says otherwise. A timer that measures the device uses its events, so that
starting and stopping does not stall it; where the accelerator asks for host timers, the device is synchronised instead.
"""

import collections
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
    if not end.query():
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


_MOST_UNREAD = 64  # steps; more events are not kept


class _Moments:
    """Moments and the seconds between them, of the device's clock or of the host's. Events are used again."""

    def __init__(self, of_device):
        self._of_device = of_device
        self._free = []

    def now(self):
        if not self._of_device:
            return time.perf_counter()
        if get_accelerator().use_host_timers():
            return device_time()
        event = self._free.pop() if self._free else get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    def passed(self, stretches):
        """Whether the device has come to their ends."""
        last = stretches[-1][1]
        return isinstance(last, float) or last.query()

    def seconds(self, stretches):
        """Their sum; their events are free afterwards."""
        total = 0.0
        for begin, end in stretches:
            total += _milliseconds(begin, end) / 1000.0
            if not isinstance(end, float):
                self._free += (begin, end)
        return total


class _CountedStep:
    seconds = None

    def __init__(self, stretches, samples):
        self.stretches, self.samples = stretches, samples


class ThroughputTimer:
    """Samples per second, from the start of reading a batch to the end of the step.

    config:           object with ``enabled`` and ``synchronized`` (the device's time, else that of the host), or None:
                      both on.
    batch_size:       samples per step over all ranks. It may change; a step counts with the number at its end.
    start_step:       steps that do not count: the first ones pay for warming up.
    steps_per_output: number of steps between two lines in the log; None: no lines.
    monitor_memory:   host memory in that line too.

    ``initialized``: start() has been called; ``started``: between start() and stop(); ``start_time``: ``time.time()``
    of the last start that counts, ``end_time`` that of the last stop that does, 0 before it. ``step_seconds``: of
    the last step, None before one that counts. ``total_elapsed_time``: seconds of the counted steps;
    ``step_elapsed_time``: of those since the last report.

    The device's time is that of events, which nobody waits for in a step: the line in the log tells of the steps that
    the device has ended, and whoever asks for seconds or samples per second waits for the last one.
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
        self._clock = _Moments(self.synchronized)
        self._total = self._since_report = 0.0  # seconds, of the counted steps whose times are read
        self._samples = self._samples_since_report = 0  # of the same steps
        self._last = None  # the last step, where it counts
        self._unread = collections.deque()  # counted steps whose times are not read
        self._stretches = []  # of the step under way, pairs of moments
        self._parts, self._whole = 0, True  # of it: micro-steps that have ended; and whether all its time is known
        self._any_whole = False  # whether there was such a step; until then the others count
        self._counted_steps = 0
        self._begin = None

    @property
    def total_elapsed_time(self):
        self._read()
        return self._total

    @property
    def step_elapsed_time(self):
        self._read()
        return self._since_report

    @property
    def step_seconds(self):
        self._read()
        return None if self._last is None else self._last.seconds

    def _read(self, waits=True):
        """Adds up the times of counted steps; without ``waits`` of those that the device has ended."""
        while self._unread and (waits or self._clock.passed(self._unread[0].stretches)):
            step = self._unread.popleft()
            step.seconds = self._clock.seconds(step.stretches)
            self._total += step.seconds
            self._since_report += step.seconds
            self._samples += step.samples
            self._samples_since_report += step.samples

    def update_epoch_count(self):
        """A new epoch begins: micro-steps are counted from 0 again."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self, reading=True):
        """Before a batch is read; called twice without a stop, the later call counts. Without ``reading`` the batch is
        there already: where other steps are measured whole, this one does not count, unless its time is known
        already."""
        self._whole = self._whole or (reading and self._parts == 0)
        if self.enabled:
            self.initialized = self.started = True
        if self.enabled and self.global_step_count >= self.start_step:
            self._begin = self._clock.now()
            self.start_time = time.time()

    def drop(self):
        """The time since the last start does not count, since it was spent on something else than training."""
        self.started, self._begin, self._whole = False, None, False

    def stop(self, global_step=False, report_speed=True):
        """After a micro-step; global_step: it was the last of its step, so the step is complete. Nothing without
        start()."""
        if not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        measured = self._begin is not None
        if measured:
            self._stretches.append((self._begin, self._clock.now()))
            self._begin, self.end_time = None, time.time()
        self._parts += 1
        self.global_step_count += global_step
        if not global_step:
            return
        stretches, whole = self._stretches, measured and self._whole
        self._stretches, self._parts, self._whole = [], 0, True
        if whole and not self._any_whole:
            self._any_whole, self._counted_steps = True, 0
            self._unread.clear()
            self._total = self._since_report = 0.0
            self._samples = self._samples_since_report = 0
        counts = whole or (measured and not self._any_whole)
        self._last = _CountedStep(stretches, self.batch_size) if counts else None
        if counts:
            self._unread.append(self._last)
            self._counted_steps += 1
            if isinstance(stretches[-1][1], float) or len(self._unread) >= _MOST_UNREAD:  # of the host, or too many
                self._read(waits=False)
        if self._counted_steps and self.steps_per_output and self.global_step_count % self.steps_per_output == 0:
            self._read(waits=False)
            if report_speed:
                self._report()
            self._since_report = 0.0
            self._samples_since_report = 0

    def _report(self):
        if self._samples_since_report == 0:  # the device has not ended the first step: the next report tells
            return
        now = self._samples_since_report / (self._since_report + TIME_EPSILON)
        mean = self._samples / (self._total + TIME_EPSILON)
        device = get_accelerator()
        text = (
            f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
            f"RunningAvgSamplesPerSec={mean}, CurrSamplesPerSec={now}, "
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
        self._read()
        return self._samples / (self._total + TIME_EPSILON)
