"""Timers: sums, resets, means, log lines, throughput."""

import time
from types import SimpleNamespace

import pytest

from deepspeed.accelerator import get_accelerator
from deepspeed.utils import timer as timer_module
from deepspeed.utils.timer import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer, trim_mean
from logs import logged
from refusals import refused


@pytest.fixture
def timers():
    return SynchronizedWallClockTimer()


@pytest.fixture
def lines():
    with logged() as seen:
        yield seen


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only when told: clock[0] += seconds."""
    now = [100.0]
    monkeypatch.setattr(timer_module.time, "perf_counter", lambda: now[0])
    if not get_accelerator().use_host_timers():
        pytest.skip("this accelerator measures by its own events")
    return now


def spend(timers, name, clock, *seconds, **stop):
    for one in seconds:
        timers(name).start()
        clock[0] += one
        timers(name).stop(**stop)


def test_elapsed_adds_up_and_resets(timers, clock):
    spend(timers, "fwd", clock, 0.010, 0.005)
    assert timers("fwd").elapsed(reset=False) == pytest.approx(15.0)
    assert timers("fwd").elapsed() == pytest.approx(15.0) and timers("fwd").elapsed() == 0
    spend(timers, "fwd", clock, 0.001, 0.002, reset=True)
    assert timers("fwd").elapsed() == pytest.approx(2.0)
    assert set(timers.get_timers()) == {"fwd"} and timers.has_timer("fwd") and not timers.has_timer("bwd")


def test_a_stretch_that_was_measured_elsewhere(timers, clock):
    assert timers("bwd").last() == 0.0
    spend(timers, "bwd", clock, 0.010, 0.004)
    assert timers("bwd").last() == pytest.approx(4.0)
    timers("bwd_allreduce").add(3.0)
    timers("bwd_allreduce").add(1.0)
    assert timers("bwd_allreduce").last() == pytest.approx(1.0)
    assert timers("bwd_allreduce").elapsed() == pytest.approx(4.0)


def test_elapsed_of_a_running_timer_includes_the_present(timers, clock):
    timers("step").start()
    clock[0] += 0.003
    assert timers("step").elapsed() == pytest.approx(3.0)
    clock[0] += 0.004
    timers("step").stop()
    assert timers("step").elapsed() == pytest.approx(4.0)


def test_start_and_stop_must_alternate(timers):
    refused(AssertionError, "not started", timers("x").stop)
    timers("x").start()
    refused(AssertionError, "already been started", timers("x").start)
    timers("x").reset()
    timers("x").start()


def test_mean_of_recorded_stretches(timers, clock):
    spend(timers, "bwd", clock, *[0.002] * 8, 0.5, 0.0, record=True)
    spend(timers, "bwd", clock, 0.7)
    assert timers("bwd").mean() == pytest.approx(2.0), "the outer tenth on either side does not count"
    assert timers.get_mean(["bwd", "none"], normalizer=2.0) == {"bwd": pytest.approx(1.0)}
    assert timers.get_mean(["bwd"]) == {"bwd": 0}


def test_log_line(timers, clock, lines):
    spend(timers, "fwd", clock, 0.25)
    spend(timers, "bwd", clock, 0.5)
    timers.log(["fwd", "none", "bwd"], normalizer=2.0, reset=False)
    assert lines[-1].endswith("time (ms) | fwd: 125.00 | bwd: 250.00")
    timers.log(["fwd"], memory_breakdown=True)
    assert "max_mem_allocated" in lines[-1] and timers("fwd").elapsed() == 0
    refused(AssertionError, "normalizer", timers.log, ["fwd"], normalizer=0)


def test_real_time_is_measured(timers):
    timers("sleep").start()
    time.sleep(0.02)
    timers("sleep").stop()
    assert 15 < timers("sleep").elapsed() < 2000


def test_noop_timer_has_the_same_verbs():
    timers = NoopTimer()
    timers("x").start()
    timers("x").stop(record=True)
    assert timers("x").elapsed(reset=True) == 0 == timers("x").mean()
    timers.log(["x"])
    assert timers.get_mean(["x"]) == {} and timers.get_timers() == {} and timers.has_timer("x")


@pytest.mark.parametrize(
    "data, trim, expected",
    [
        ([], 0.1, 0), ([5], 0.5, 5), ([1, 2, 3, 4, 100], 0.2, 3), ([4, 2], 0.5, 3), (range(11), 0.1, 5),
        ([3, 1, 2], 0.0, 2), ([9, 1, 2], 1.0, 2),
    ],
)  # fmt: skip
def test_trim_mean(data, trim, expected):
    assert trim_mean(data, trim) == expected


def test_trim_mean_keeps_its_input_and_checks_the_share():
    data = [3, 1, 2]
    trim_mean(data, 0.3)
    assert data == [3, 1, 2]
    for share in (-0.1, 1.1):
        refused(AssertionError, "trim_percent", trim_mean, data, share)


CONFIG = SimpleNamespace(enabled=True, synchronized=True)


def steps(timer, clock, count, micro_steps=2, seconds=0.5):
    for _ in range(count):
        for micro in range(micro_steps):
            timer.start()
            clock[0] += seconds
            timer.stop(global_step=micro == micro_steps - 1)


def test_throughput(clock):
    said = []
    timer = ThroughputTimer(CONFIG, batch_size=8, start_step=2, steps_per_output=4, logging_fn=said.append)
    assert timer.avg_samples_per_sec() == float("-inf")
    steps(timer, clock, 2, seconds=99.0)  # warming up does not count
    assert timer.avg_samples_per_sec() == float("-inf")
    steps(timer, clock, 4)
    assert timer.avg_samples_per_sec() == pytest.approx(8.0, rel=1e-5)
    assert len(said) == 1 and "epoch=0/micro_step=8/global_step=4, RunningAvgSamplesPerSec=" in said[0]
    timer.update_epoch_count()
    steps(timer, clock, 2, seconds=0.25)
    assert "epoch=1/micro_step=4/global_step=8" in said[1]
    current = float(said[1].split("CurrSamplesPerSec=")[1].split(",")[0])
    assert current == pytest.approx(4 * 8 / (2 * 1.0 + 2 * 0.5), rel=1e-4)


def test_throughput_tells_where_it_stands(clock):
    timer = ThroughputTimer(CONFIG, batch_size=8, start_step=1)
    assert (timer.initialized, timer.started, timer.start_step, timer.start_time) == (False, False, 1, 0)
    assert timer.end_time == 0
    timer.stop(global_step=True)  # not started: nothing to stop
    assert (timer.micro_step_count, timer.global_step_count) == (0, 0)
    timer.start()
    assert (timer.initialized, timer.started, timer.start_time) == (True, True, 0)  # the first step does not count
    timer.stop(global_step=True)
    assert (timer.initialized, timer.started, timer.global_step_count, timer.end_time) == (True, False, 1, 0)
    before = time.time()
    timer.start()
    assert before <= timer.start_time <= time.time() and timer.started
    timer.stop(global_step=True)
    assert timer.start_time <= timer.end_time <= time.time()


def test_throughput_of_steps_that_are_not_known_whole(clock):
    """They count for as long as there is no other step."""
    timer = ThroughputTimer(batch_size=10, start_step=0)
    for seconds in (1.0, 3.0):
        timer.drop()
        timer.start(reading=False)
        clock[0] += seconds
        timer.stop(global_step=True)
    assert timer.avg_samples_per_sec() == pytest.approx(5.0) and timer.step_seconds == pytest.approx(3.0)
    timer.start()
    clock[0] += 2.0
    timer.stop(global_step=True)
    assert timer.avg_samples_per_sec() == pytest.approx(5.0)
    timer.batch_size = 30
    for reading, counts in ((False, True), (True, True)):
        timer.start(reading=reading)
        clock[0] += 6.0
        timer.stop()
        timer.start(reading=False)
        clock[0] += 2.0
        timer.stop(global_step=True)
        assert (timer.step_seconds is not None) == counts
    timer.drop()
    timer.start(reading=False)
    timer.stop(global_step=True)
    assert timer.step_seconds is None and timer.avg_samples_per_sec() == pytest.approx(70 / 18)


def test_throughput_switched_off(clock):
    timer = ThroughputTimer(SimpleNamespace(enabled=False, synchronized=True), batch_size=8)
    steps(timer, clock, 5)
    assert (timer.initialized, timer.started, timer.start_time) == (False, False, 0)
    assert timer.global_step_count == 0 and timer.avg_samples_per_sec() == float("-inf")


class Events:
    """An accelerator with events: they have times of its clock when the device gets there, and say who waits."""

    def __init__(self):
        self.time, self.made, self.waits, self.behind = 0.0, 0, 0, 0.0

    def Event(self, enable_timing):
        assert enable_timing
        self.made += 1
        return SimpleEvent(self)

    def use_host_timers(self):
        return False

    def memory_allocated(self):
        return 0

    max_memory_allocated = memory_allocated


class SimpleEvent:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.time = self.device.time

    def query(self):
        return self.time + self.device.behind <= self.device.time

    def synchronize(self):
        self.device.waits += not self.query()

    def elapsed_time(self, end):
        return (end.time - self.time) * 1000.0


def test_throughput_by_events_waits_for_nothing(monkeypatch):
    """A call that asks for times waits. Events are used again, and few are kept."""
    device, said = Events(), []
    monkeypatch.setattr(timer_module, "get_accelerator", lambda: device)
    timer = ThroughputTimer(CONFIG, batch_size=8, start_step=0, steps_per_output=100, logging_fn=said.append)

    def take(count, seconds):
        for _ in range(count):
            for micro in range(2):
                timer.start()
                device.time += seconds
                timer.stop(global_step=micro == 1)

    device.behind = 0.2  # seconds: the last step of each report has not ended
    take(10, 0.5)
    assert device.waits == 0 and device.made == 40
    assert timer.step_seconds == pytest.approx(1.0) and timer.total_elapsed_time == pytest.approx(10.0)
    assert timer.avg_samples_per_sec() == pytest.approx(8.0) and device.waits == 1
    take(89, 0.25)
    assert said == [] and device.made <= 4 * 64
    take(1, 0.25)
    assert "global_step=100" in said[0] and device.waits == 1
    current = float(said[0].split("CurrSamplesPerSec=")[1].split(",")[0])
    assert current == pytest.approx(8 * 99 / (10.0 + 89 * 0.5), rel=1e-4)
    assert timer.step_elapsed_time == pytest.approx(0.5) and device.waits == 2
    take(2, 1.0)
    assert timer.step_elapsed_time == pytest.approx(4.5) and timer.total_elapsed_time == pytest.approx(59.0)
    made = device.made
    take(20, 1.0)
    assert device.made == made


def test_a_report_of_each_step(monkeypatch):
    """It tells of the step before, which the device has ended."""
    device, said = Events(), []
    device.behind = 0.4
    monkeypatch.setattr(timer_module, "get_accelerator", lambda: device)
    timer = ThroughputTimer(CONFIG, batch_size=8, start_step=0, steps_per_output=1, logging_fn=said.append)
    for seconds in (2.0, 4.0, 1.0, 1.0):
        timer.start()
        device.time += seconds
        timer.stop(global_step=True)
    speeds = [float(line.split("CurrSamplesPerSec=")[1].split(",")[0]) for line in said]
    assert speeds == pytest.approx([4.0, 2.0, 8.0], rel=1e-4) and device.waits == 0
    timer.steps_per_output = 2
    timer.start()
    timer.stop(global_step=True, report_speed=False)
    assert len(said) == 3
